"""The gate of hysparse: how likely a token needs, and is needed by, full attention. Not a method itself.

logit = bias + prior of the token's class + sense * sensitivity + attention * log2(attention received / uniform attention)

g = sigmoid(logit); a token is gated in where g >= 0.5. The same in prefill and in a step, except that a token that was only
just fed has received nothing yet and counts as the average token of its prompt.
"""

import torch
from torch import Tensor, nn

from methods.trained import TrainedPart

CLASSES = ("other", "content", "proper", "number")
# words of four letters and more that carry no content
FUNCTION_WORDS = frozenset(
    "about after again against also although another because been before being between both could does down during "
    "each else even ever every from have having here however into itself just least less like many might more most "
    "much must near neither never none only other otherwise over quite rather same several shall should since some "
    "still such than that their them then there these they this those though through thus under until upon very were "
    "what when where whether which while whom whose will with within without would your yours".split()
)
MOST = 12  # log2 of attention relative to uniform is clamped to +- this
EPS = 1e-6


def class_of(text: str) -> str:
    """Class of a token's text by cheap rules.

    Any digit makes a number; a capital followed by small letters a proper noun, also at the start of a sentence; four letters
    and more, if no function word, content.
    """
    word = text.strip()
    if any(char.isdigit() for char in word):
        return "number"
    if not word.isalpha():
        return "other"
    if word.lower() in FUNCTION_WORDS:
        return "other"
    if word[0].isupper() and word[1:2].islower():
        return "proper"
    return "content" if len(word) >= 4 else "other"


def token_classes(tokenizer, vocab_size: int) -> bytes:
    """Class of every token id as an index into CLASSES; added tokens and ids that the tokenizer lacks are "other"."""
    ids = range(min(vocab_size, tokenizer.vocab_size))
    known = bytes(CLASSES.index(class_of(tokenizer.decode([i]))) for i in ids)
    return known + bytes(vocab_size - len(known))


class Gate(TrainedPart):
    """Weights in fp32: training-free as made, trained by `python -m harness.train_heads`.

    channels: values of one token over all KV heads. The depthwise convolution over the KERNEL tokens before says what a token's
    value vector would be if its neighbours determined it; sensitivity is the distance from that, 0 .. 1.
    """

    KERNEL = 4
    knob, misfit = "method.gate", "holds no gate of this model"

    def __init__(self, channels: int):
        super().__init__()
        self.prior = nn.Parameter(torch.tensor([0.0, 0.25, 0.5, 0.75]))
        self.conv = nn.Parameter(torch.full((self.KERNEL, channels), 1 / self.KERNEL))
        self.sense = nn.Parameter(torch.tensor(0.5))
        self.attention = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-2.0))

    @classmethod
    def num_bytes(cls, channels: int) -> int:
        """Bytes of the weights."""
        return 4 * (len(CLASSES) + cls.KERNEL * channels + 3)

    def expected(self, earlier: Tensor) -> Tensor:
        """Value vectors [..., C] that the neighbours suggest: earlier [..., KERNEL, C], the token just before first."""
        return (earlier * self.conv).sum(-2)

    def distances(self, values: Tensor, earlier: Tensor) -> Tensor:
        """Squares of |v - expected|, |v| and |expected|, which add up over ranks: [..., 3] from values [..., C]."""
        guess = self.expected(earlier)
        return torch.stack([(values - guess).square().sum(-1), values.square().sum(-1), guess.square().sum(-1)], -1)

    @staticmethod
    def sensitivity(distances: Tensor) -> Tensor:
        """0 (its neighbours say it all) .. 1 from distances [..., 3]."""
        # the root of zero has no slope
        off, own, guess = distances.clamp(min=EPS**2).sqrt().unbind(-1)
        return off / (own + guess)

    def before(self, values: Tensor) -> Tensor:
        """The KERNEL tokens before each, zeros before the first: values [T, C] -> [T, KERNEL, C]."""
        padded = nn.functional.pad(values, (0, 0, self.KERNEL, 0))
        return torch.stack([padded[self.KERNEL - i : len(padded) - i] for i in range(1, self.KERNEL + 1)], 1)

    def forward(self, classes: Tensor, sensitivity: Tensor, received: Tensor) -> Tensor:
        """Logits [...] from class ids [...], sensitivity [...] and log2 of the attention received, relative to uniform."""
        return self.bias + self.prior[classes] + self.sense * sensitivity + self.attention * received


def relative_attention(mass: Tensor, num_seen: int) -> Tensor:
    """log2 of mass [T] (attention per query) over that of uniform attention, clamped to +- MOST."""
    return (mass * num_seen).clamp(min=2.0**-MOST).log2().clamp(max=float(MOST))
