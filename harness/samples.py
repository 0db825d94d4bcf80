"""The per-sample log of a cell: a line of JSON per sample, appended as it finishes, so that a rerun goes on after it.

The file is outputs/rows/<config_hash>.samples.jsonl. A line counts for a rerun only with the same code, versions and device,
and only for a sample whose ids are the same. Several processes may append to one file.
"""

import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path


class SampleLog:
    """Append-only log. key: everything besides the configuration that a stored score depends on."""

    def __init__(self, path: Path, key: dict):
        self.path = Path(path)
        self.key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]

    def read(self) -> dict[str, dict]:
        """Finished samples by id, the newest of each; lines of other code, and what a crash left of a line, are passed over."""
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except OSError:
            return {}
        found = {}
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(entry, dict) and entry.pop("run_key", None) == self.key:
                found[entry["id"]] = entry
        return found

    def append(self, sample: dict) -> None:
        """Add one finished sample. A log that cannot be written costs the resume, not the run."""
        data = (json.dumps({"run_key": self.key} | sample) + "\n").encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    # a process that was killed while it wrote has left half a line: it must not swallow this one
                    data = data if file.read(1) == b"\n" else b"\n" + data
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            print(f"warning: {self.path} cannot be written ({err}): this cell cannot be resumed", file=sys.stderr)
