"""Revisions of a git repository: names to full hashes, hashes to subject lines. Runs git, nothing else.

A revision is text from a user and may look like an option or hold anything; git gets it behind
`--end-of-options` and never through a shell.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

#: Longest wait for git in seconds; a repository on a dead network mount must not hang a report.
GIT_LIMIT = 30.0


def _git(repo: Path, *arguments: str, text: str = "") -> str | None:
    """Standard output of one git command, None if git is absent, refuses or hangs."""
    try:
        done = subprocess.run(
            ["git", "-C", str(repo), *arguments],
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=GIT_LIMIT,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def resolve(revision: str, repo: Path) -> str | None:
    """Full hash of a branch, tag, hash or expression such as HEAD~1; None if the repository has none."""
    if not revision.strip():
        return None
    found = _git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return found.strip() if found else None


def subjects(hashes: Iterable[str], repo: Path) -> dict[str, str]:
    """Subject lines of those commits that the repository has; empty where it is no repository."""
    text = "\n".join(h for h in hashes if h.isalnum())
    if not text:
        return {}
    shown = _git(repo, "log", "--no-walk", "--ignore-missing", "--stdin", "--format=%H %s", text=text)
    lines = (line.partition(" ") for line in (shown or "").splitlines())
    # A subject is shown on terminals, where control characters would draw.
    return {sha: "".join(c if c.isprintable() else "?" for c in subject) for sha, _, subject in lines}
