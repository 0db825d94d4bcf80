"""Real text that every machine has: Python's documentation topics and the sources of well-known library modules.

No download and no licence question: 5 million characters of English and code, more than a million tokens. The text
depends on the Python version (a sample's `prompt_sha` shows it), never on the seed. `python -m tasks.corpus` prints its
size.
"""

import functools
import pydoc_data.topics
import re
import sysconfig
from pathlib import Path

MODULES = """
    _collections_abc _pydecimal _pyio argparse ast asyncio/base_events asyncio/events asyncio/selector_events
    asyncio/streams asyncio/tasks asyncio/unix_events bdb codecs collections/__init__ concurrent/futures/process
    configparser contextlib dataclasses difflib dis doctest email/_header_value_parser email/message enum fractions
    ftplib functools http/client http/cookiejar http/server imaplib importlib/_bootstrap
    importlib/_bootstrap_external inspect ipaddress locale logging/__init__ logging/config logging/handlers mailbox
    multiprocessing/connection multiprocessing/managers multiprocessing/pool ntpath optparse os pdb pickle
    pickletools platform plistlib pstats pydoc random shutil smtplib socket socketserver ssl statistics subprocess
    tarfile tempfile threading tokenize trace traceback turtle typing unittest/case unittest/mock urllib/parse
    urllib/request uuid venv/__init__ webbrowser xml/dom/minidom xml/etree/ElementTree xmlrpc/client xmlrpc/server
    zipimport
""".split()
PIECE_CHARS = 2000


@functools.cache
def source_files() -> list[tuple[str, str]]:
    """Return (dotted module, source) of the library modules that this Python has."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = [(name, stdlib / f"{name}.py") for name in MODULES]
    return [
        (name.removesuffix("/__init__").replace("/", "."), path.read_text(encoding="utf-8"))
        for name, path in paths
        if path.is_file()
    ]


@functools.cache
def pieces() -> list[str]:
    """Return the corpus, cut at blank lines into pieces of about `PIECE_CHARS` characters."""
    topics = pydoc_data.topics.topics
    documents = [topics[name] for name in sorted(topics)] + [text for _, text in source_files()]
    # ASCII only: a cut between any two tokens then never splits a character
    documents = [document.encode("ascii", "ignore").decode().strip() + "\n\n" for document in documents]
    return [piece for document in documents for piece in _cut(document)]


def _cut(document: str) -> list[str]:
    result = [""]
    for block in re.split(r"(?<=\n\n)", document):
        if len(result[-1]) >= PIECE_CHARS:
            result.append("")
        result[-1] += block
    return result


@functools.cache
def text() -> str:
    """Return the whole corpus."""
    return "".join(pieces())


@functools.cache
def long_numbers() -> str:
    """Return all runs of 7 or more digits in the corpus: a number that is not a substring of this is nowhere in it."""
    return " ".join(re.findall("[0-9]{7,}", text()))


class Corpus:
    """The corpus in one tokenizer's ids; each piece is tokenised once per process, when it is first needed."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.num_pieces = len(pieces())
        self._ids: dict[int, list[int]] = {}
        self._ends_line: dict[int, bool] = {}

    def piece_ids(self, index: int) -> list[int]:
        """Return the ids of piece `index`."""
        if index not in self._ids:
            self._ids[index] = list(self.tokenizer.encode(pieces()[index], add_special_tokens=False))
        return self._ids[index]

    def ends_line(self, token: int) -> bool:
        """Return whether a line ends in this token."""
        if token not in self._ends_line:
            self._ends_line[token] = "\n" in self.tokenizer.decode([token])
        return self._ends_line[token]

    def running_ids(self, num_tokens: int, start: int, num_pieces: int | None = None) -> list[int]:
        """Return `num_tokens` ids of running text from piece `start` on, wrapping at the end of the corpus.

        Fewer if `num_pieces` pieces (default: all, once) do not hold as many.
        """
        ids = []
        for step in range(num_pieces or self.num_pieces):
            if len(ids) >= num_tokens:
                break
            ids += self.piece_ids((start + step) % self.num_pieces)
        return ids[:num_tokens]


_corpora: dict[int, Corpus] = {}


def corpus_of(tokenizer) -> Corpus:
    """Return the process-wide Corpus of `tokenizer`."""
    # keyed by identity: the Corpus keeps its tokenizer alive, so an id is never reused
    return _corpora.setdefault(id(tokenizer), Corpus(tokenizer))


if __name__ == "__main__":
    print(f"{len(pieces())} pieces, {len(text())} characters")
