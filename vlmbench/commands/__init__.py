"""Commands of `vlmbench`, one file each; `cli` registers them."""
