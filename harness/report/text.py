"""Values as people read them, the same in the card, the page and the comparison. Unknown is a dash."""

DASH = "–"


def plain(value) -> str:
    return DASH if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float | None) -> str:
    """Three significant digits, no exponent for large values."""
    if value is None:
        return DASH
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def size(value: float | None) -> str:
    """Bytes in B, KiB, MiB or GiB."""
    if value is None:
        return DASH
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def ms(value: float | None) -> str:
    """Milliseconds, or seconds from ten of them on."""
    if value is None or value < 10_000:
        return DASH if value is None else f"{number(value)} ms"
    return f"{value / 1000:.2f} s" if value < 1e8 else f"{value / 1000:.3g} s"


def percent(value: float | None) -> str:
    """A share of 1 in percent."""
    return DASH if value is None else f"{value * 100:.1f} %"


def tokens(value: int) -> str:
    """Context lengths: 4k, 16k, 1000."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)


def factor(value: float, reference: float, words: tuple[str, str]) -> str:
    """`1.25x slower`: value against reference as a factor above 1 and what it means; words for (below, above)."""
    ratio = value / reference
    return f"{max(ratio, 1 / ratio):.2f}x {words[ratio > 1]}"


LESS, TIME, RATE, LOSS = ("less", "more"), ("faster", "slower"), ("slower", "faster"), ("better", "worse")
SAME = 0.02  # factors nearer to 1 than this are no difference


def change(value: float | None, reference: float | None, words: tuple[str, str]) -> str:
    """The factor against the reference in words, `same` within 2 %, a dash where either is unknown or 0."""
    if not value or not reference:
        return DASH
    return "same" if abs(value / reference - 1) < SAME else factor(value, reference, words)


def style_of(change_text: str) -> str:
    """Green for a gain, red for a loss, nothing otherwise."""
    word = change_text.rpartition(" ")[2]
    return "green" if word in ("less", "faster", "better") else "red" if word in ("more", "slower", "worse") else ""
