"""``python -m jmla``."""

from jmla.cli import main

if __name__ == "__main__":
    main()
