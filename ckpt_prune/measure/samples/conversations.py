"""Conversations in rows of JSON, written out as a model reads them: by its tokenizer's own chat template."""

from typing import TYPE_CHECKING, Any

from ckpt_prune.common.errors import UserError, one_line
from ckpt_prune.common.text_encoding import check_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Key of a conversation → keys of a message in it: OpenAI's form and ShareGPT's."""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""ShareGPT's names of roles. All others are the template's."""
_DAY = "26 Jul 2024"
"""Today, for templates that ask: the same file gives the same tokens tomorrow. Llama's have it if there is no clock."""
_CLOCK = f"{{%- macro strftime_now(format) -%}}{_DAY}{{%- endmacro -%}}"


def is_conversation(row: Any) -> bool:
    """Return True if a value of JSON is an object with messages."""
    return isinstance(row, dict) and any(key in row for key in _KEYS)


def write_conversation(where: str, row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Write out a conversation by a tokenizer's chat template. `where` is its file and line, for errors."""
    messages = _read_messages(where, row)
    if tokenizer is None or not tokenizer.chat_template:
        whose = "" if tokenizer is None else f" {tokenizer.name_or_path}"
        raise UserError(
            f"{where}: a conversation, and the tokenizer{whose} has no chat template: give plain texts "
            '({"text": "…"}), or put the chat_template.jinja of the model\'s chat version into its folder'
        )
    return write_messages(where, messages, tokenizer, tokenizer.get_chat_template())


def write_messages(
    where: str, messages: list[dict[str, Any]], tokenizer: "PreTrainedTokenizerBase", template: str
) -> str:
    """Write out messages by a chat template: that of a tokenizer, or of its processor. `where` is their place."""
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=_CLOCK + template, tokenize=False, date_string=_DAY
        )
    except Exception as error:  # templates raise what they like
        raise UserError(f"{where}: the model's chat template does not take it: {one_line(error)}") from error
    assert isinstance(text, str)
    return text


def _read_messages(where: str, row: dict[str, Any]) -> list[dict[str, str]]:
    key = next(key for key in _KEYS if key in row)
    given = row[key]
    if not isinstance(given, list) or not given:
        raise UserError(f'{where}: "{key}" must be a list of messages, not {type(given).__name__ if given else given}')
    messages = []
    for number, message in enumerate(given, start=1):
        place = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise UserError(f"{place}: a message must be an object with a role and its content")
        role_key, text_key = ("role", "content") if "role" in message else _KEYS[key]
        role, text = message.get(role_key), _read_content(message.get(text_key))
        for name, value in ((role_key, role), (text_key, text)):
            if not isinstance(value, str):
                raise UserError(f'{place}: no string under "{name}"')
        assert isinstance(role, str)
        assert isinstance(text, str)
        check_unicode(place, role, text)
        messages.append({"role": _ROLES.get(role, role), "content": text})
    return messages


def _read_content(content: Any) -> Any:
    """Return the text of a content that is a list of parts, all of them text; anything else as it is."""
    if not isinstance(content, list) or not content:
        return content
    parts = [
        part["text"]
        for part in content
        if isinstance(part, dict) and isinstance(part.get("text"), str) and isinstance(part.get("type", ""), str)
    ]
    return "".join(parts) if len(parts) == len(content) else None
