import os

# Before torch is loaded: on a busy machine threads that spin while they wait make a step many times
# slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
