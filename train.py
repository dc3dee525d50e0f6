"""Train, validate, test or predict: ``python train.py --help``."""

from project.engine.watch import Watch

if __name__ == "__main__":
    with Watch():  # from here on Ctrl-C is answered; torch, which takes seconds to import, comes after it
        from project.cli import main

        main()
