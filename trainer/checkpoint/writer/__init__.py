"""The writer process of each rank: files from host memory to the disk beside training. No torch.

Read in this order:
``progress`` how far a host buffer is filled, and how the writer learns of it; ``process`` the
writer itself; ``client`` the rank's end of the pipe to it; ``throttle`` the speed at which it is
given data while training goes on.
"""
