"""`python -m hybrid`: the command line of this interpreter, where its folder of scripts is not on the path."""

from hybrid.cli.app import main

if __name__ == "__main__":
    main()
