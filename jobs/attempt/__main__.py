"""``python -m jobs.attempt begin|end RUN``, as the batch script calls it."""

import sys

from jobs.attempt.bookkeeping import main

if __name__ == "__main__":
    sys.exit(main())
