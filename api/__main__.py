"""`python -m weightdepot.api` is the command `weightdepot`."""

from weightdepot.api.cli import main

if __name__ == "__main__":
    main()
