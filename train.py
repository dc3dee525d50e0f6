"""Train, validate, test or predict: ``python train.py --help``."""

from project.cli import main

if __name__ == "__main__":
    main()
