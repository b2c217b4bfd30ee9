"""vlmbench: what a KV-cache change does to vision-language models, measured before it is merged.

Importing the package loads neither torch nor transformers; `vlmbench.cli` is the command line,
`vlmbench.worker` the process that measures.
"""

__version__ = "0.1.0"
