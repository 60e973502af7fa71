"""`python -m holdfast`: the same as the command `holdfast`, for environments whose programs are not in `PATH`."""

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
