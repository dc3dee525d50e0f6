"""Train, validate, test or predict: ``python train.py --help``."""

import gc

from project.engine.watch import Watch

if __name__ == "__main__":
    with Watch():  # from here on Ctrl-C is answered; torch, which takes seconds to import, comes after it
        gc.disable()  # nothing of what is imported ever goes: looking for what could takes a sixth of the start
        from project.cli import main

        gc.enable()
        gc.freeze()
        main()
