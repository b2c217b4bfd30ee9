"""`python -m vlmbench` is the `vlmbench` command."""

from vlmbench.cli import main

main()
