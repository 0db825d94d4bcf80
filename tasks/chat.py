"""What stands around a prompt: the tokenizer's BOS alone, or the messages of its chat template. No Task lives here.

A prompt is `head + document + question + to_answer + beginning of the answer`; a later turn is
`to_question + question + to_answer + beginning of the answer`. Without a template all but a BOS in `head` is empty.
"""

from dataclasses import dataclass

from tasks.base import leading_ids

MARKS = ("<<first question>>", "<<first answer>>", "<<second question>>")
CANNOT_SPLIT = "task.chat_template=auto: this template alters or refuses a plain message; use task.chat_template=none"


@dataclass(frozen=True)
class Chat:
    """Ids before the document, between a question and its answer, and between an answer and the next question."""

    head: list[int]
    to_answer: list[int]
    to_question: list[int]


def chat_of(tokenizer, chat_template: str, num_turns: int = 1) -> Chat:
    """Return the frame of a conversation: plain for chat_template "none" or a tokenizer that has no template.

    ValueError if the template does not pass a plain message through; a template that has a BOS gets no second one.
    """
    if chat_template == "none" or not getattr(tokenizer, "chat_template", None):
        return Chat(leading_ids(tokenizer), [], [])
    head, to_answer = _split(tokenizer, MARKS[:1])
    to_question = ""
    if num_turns > 1:
        # only a conversation shows what ends an answer
        _, _, to_question, to_answer = _split(tokenizer, MARKS)
    encoded = [list(tokenizer.encode(text, add_special_tokens=False)) for text in (head, to_answer, to_question)]
    lead = leading_ids(tokenizer)
    if encoded[0][:1] != lead:
        encoded[0] = lead + encoded[0]
    return Chat(*encoded)


def _split(tokenizer, contents: tuple[str, ...]) -> list[str]:
    """Render messages of user and assistant in turn and return what stands before, between and after their contents."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    options = {"tokenize": False, "add_generation_prompt": True}
    try:
        # templates that think aloud by default know this switch, others ignore it
        rest = tokenizer.apply_chat_template(messages, enable_thinking=False, **options)
    except Exception as err:  # a template raises what it likes
        raise ValueError(f"{CANNOT_SPLIT} ({' '.join(str(err).split())[:100]})") from err
    parts = []
    for content in contents:
        before, found, rest = rest.partition(content)
        if not found:
            raise ValueError(CANNOT_SPLIT)
        parts.append(before)
    return [*parts, rest]
