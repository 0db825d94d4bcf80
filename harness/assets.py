"""Where the files that belong to one model lie: its calibration, its trained heads. Reading and writing share this rule.

home: assets/<name>/ for a model that ships one, the model's own folder for a model.path that is a folder. Everything else, and
whatever cannot be written at home, lies in the user's cache; what lies there comes first when it is read.
"""

import os
from pathlib import Path

from harness.models import cache_dir

ROOT = Path(__file__).resolve().parent.parent


def places(name: str, path: str | None, file: str) -> list[Path]:
    """Where `file` of model `name` (or of model.path=`path`) may lie; the first that exists counts."""
    folder = Path(path).expanduser() if path else ROOT / "assets" / name
    cached = cache_dir() / "model_files" / (path or name).strip("/").replace("/", "--") / file
    return [cached, folder.resolve() / file] if folder.is_dir() else [cached]


def find(name: str, path: str | None, file: str) -> str:
    """The file, or where it would be written; relative where it lies in the checkout, so that it means the same anywhere."""
    candidates = places(name, path, file)
    found = next((place for place in candidates if place.is_file()), candidates[-1])
    return found.relative_to(ROOT).as_posix() if found.is_relative_to(ROOT) else str(found)


def to_write(name: str, path: str | None, file: str) -> Path:
    """Where a new `file` goes. A copy that would be read in its place is removed."""
    cached, *homes = places(name, path, file)
    for home in homes:
        if os.access(home.parent, os.W_OK):
            cached.unlink(missing_ok=True)
            return home
    cached.parent.mkdir(parents=True, exist_ok=True)
    return cached
