"""The asv suite: a file a phase, each reading records that `vlmbench.suite` makes once a case."""
