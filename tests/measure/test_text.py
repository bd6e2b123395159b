import codecs
import gzip
import hashlib
import logging

import pytest
import torch

from ckpt_prune.measure.samples.text import (
    cut_windows,
    fingerprint_windows,
    load_tokenizer,
    mix_windows,
    read_text,
    tokenise_text,
)
from tests.evaluation.tiny import BOS, EOS, tiny_tokenizer
from tests.refusals import refusal

EACH_LINE = 'each line must be {"text": "…"} or {"messages": […]}'
SKIPPING = ({"samples": 20}, {"samples": 30, "skip": 20})
TAKEN = ".txt, .jsonl, .ndjson or .json file in UTF-8, or UTF-16 or UTF-32 with a byte order mark"


class TestReadText:
    def test_files_are_joined_by_a_blank_line(self, tmp_path):
        (tmp_path / "a.txt").write_text("één\n", encoding="utf-8")
        (tmp_path / "b.jsonl").write_text('{"text": "one\u2028", "id": 1}\n\n{"text": "two"}\n', encoding="utf-8")
        assert read_text([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == "één\n\n\none\u2028\n\ntwo"

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be"])
    def test_a_byte_order_mark_says_how_a_file_is_encoded(self, tmp_path, encoding):
        mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
        text, rows = "één\r\ntwo\n", '{"text": "één"}\r\n{"text": "two"}\n'
        (tmp_path / "a.txt").write_bytes(mark + text.encode(encoding))
        (tmp_path / "a.JSONL").write_bytes(mark + rows.encode(encoding))
        assert read_text([tmp_path / "a.txt"]) == "één\ntwo\n"
        assert read_text([tmp_path / "a.JSONL"]) == "één\n\ntwo"

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("a.Jsonl", '{"text": "one"}\n\ufeff{"text": "two"}\n'),
            ("a.ndjson", '{"text": "one"}\n{"text": "two"}'),
            ("a.json", '["one", "two"]'),
            ("a.json", '[\n  {"text": "one"},\n  {"text": "two"}\n]\n'),
            ("a.jsonl", '[{"text": "one"}, "two"]'),
            ("a.json", '{"text": "one"}\n{"text": "two"}\n'),
            ("a.json", '{\n"text": "one\\n\\ntwo"\n}\n'),
        ],
    )
    def test_rows_of_json_however_they_are_written(self, tmp_path, name, content):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_text([tmp_path / name]) == "one\n\ntwo"

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("a.txt", gzip.compress(b"text", mtime=0), ": compressed by gzip, and no text; unpack it first"),
            (
                "a.txt",
                b"PAR1....",
                ': a parquet table, and no text; write its texts as .jsonl, one {"text": "…"} a line',
            ),
            ("a.csv", b"text\none", ': a table, and no text; write its texts as .jsonl, one {"text": "…"} a line'),
            (
                "a.txt",
                b"\xff\xfea",
                f": its byte order mark says UTF-16, and it is not (byte 2); give a {TAKEN}",
            ),
            ("a.jsonl", b'{"text": 3}', f', line 1: no string under "text"; {EACH_LINE}'),
            ("a.jsonl", b'{"text": "a"}\n"b"', f", line 2: a string without a key; {EACH_LINE}"),
            (
                "a.json",
                b'["one", 2]',
                ', row 2: no string under "text"; each row must be a string, {"text": "…"} or {"messages": […]}',
            ),
            ("a.json", b'[\n"one",\n]', ", line 3: not valid JSON: Expecting value"),
            ("a.jsonl", b"[" * 100_000, ": nested too deeply"),
            (
                "a.jsonl",
                b'{"text": "one"}\n{"text": "cut \\ud83d"}',
                ", line 2: '\\ud83d' is half of a surrogate pair and no Unicode character; cut texts between "
                "characters, not between units of UTF-16",
            ),
        ],
    )
    def test_what_is_no_text_is_named(self, tmp_path, name, content, reason):
        (tmp_path / name).write_bytes(content)
        assert refusal(read_text, [tmp_path / name]) == f"{tmp_path / name}{reason}"

    def test_refusals(self, tmp_path):
        assert refusal(read_text, []) == f"no text file given: name at least one {TAKEN}"
        assert refusal(read_text, [tmp_path]) == f"{tmp_path}: a folder, not a text file"


class TestLoadTokenizer:
    def test_what_was_saved_is_loaded_and_still_adds_its_bos(self, tmp_path):
        tiny_tokenizer("<s> $A").save_pretrained(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenise_text(tokenizer, "ab").tolist() == [BOS, 3, 4]

    def test_none_there(self, tmp_path):
        assert refusal(load_tokenizer, tmp_path) == (
            f"{tmp_path}: no tokenizer (tokenizer.json, tokenizer.model or tokenizer_config.json); "
            "copy the model's tokenizer files into the folder"
        )

    def test_damaged(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{")
        assert refusal(load_tokenizer, tmp_path).startswith(f"{tmp_path / 'tokenizer.json'} is not a readable JSON ")
        (tmp_path / "tokenizer.json").write_text("{}")
        assert refusal(load_tokenizer, tmp_path).startswith(f"{tmp_path}: the tokenizer does not load: ")


class TestTokenStream:
    @pytest.mark.parametrize(
        ("template", "text", "bos", "begins_with_bos"),
        [
            ("<s> $A", "ab", "auto", True),
            ("<s> $A </s>", "ab", "auto", True),
            ("<s> $A", "ab", "never", False),
            (None, "ab", "auto", False),
            ("$A </s>", "ab", "auto", False),
            (None, "ab", "always", True),
        ],
    )
    def test_one_bos_before_the_stream_if_wanted(self, template, text, bos, begins_with_bos):
        stream = tokenise_text(tiny_tokenizer(template), text, bos)
        assert stream.tolist() == [BOS] * begins_with_bos + [3, 4]
        assert stream.dtype == torch.int64

    @pytest.mark.parametrize("bos", ["auto", "always", "never"])
    def test_a_bos_written_in_the_text_is_read_and_not_doubled(self, bos):
        assert tokenise_text(tiny_tokenizer("<s> $A"), "<s>a<s>b</s>", bos).tolist() == [BOS, 3, BOS, 4, EOS]

    def test_tokenizer_without_bos(self):
        tokenizer = tiny_tokenizer(bos=None)
        assert tokenise_text(tokenizer, "a").tolist() == [3]
        assert refusal(tokenise_text, tokenizer, "a", "always") == (
            "this tokenizer has no beginning-of-sequence token; use bos=auto or bos=never"
        )

    def test_longer_than_the_context_without_a_warning(self):
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            assert len(tokenise_text(tiny_tokenizer("<s> $A"), "a" * 100)) == 101
            assert records == []
            tiny_tokenizer()("a" * 100)
            assert len(records) == 1, "the control: the plain call does warn"
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


class TestConversations:
    TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    ROWS = (
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}',
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}, '
        '{"role": "assistant", "content": "Ho"}]}',
    )
    WRITTEN = "<user>Hi</user>\n<assistant>Ho</assistant>\n"

    @staticmethod
    def read(tmp_path, content, template=TEMPLATE):
        (tmp_path / "a.jsonl").write_text(content, encoding="utf-8")
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        return read_text([tmp_path / "a.jsonl"], tokenizer)

    @pytest.mark.parametrize("row", ROWS)
    def test_both_forms_are_written_by_the_chat_template(self, tmp_path, row):
        assert self.read(tmp_path, row) == self.WRITTEN

    def test_they_follow_each_other_and_texts_stand_apart(self, tmp_path):
        rows = "\n".join([*self.ROWS[:2], '{"text": "one"}', self.ROWS[0]])
        assert self.read(tmp_path, rows) == f"{self.WRITTEN * 2}\n\none\n\n{self.WRITTEN}"

    def test_a_template_with_a_date_gives_the_same_every_day(self, tmp_path):
        dated = "{{ date_string }} {{ strftime_now('%Y-%m-%d') }}"
        assert self.read(tmp_path, self.ROWS[0], dated) == "26 Jul 2024 26 Jul 2024"

    @pytest.mark.parametrize(
        ("row", "template", "reason"),
        [
            ('{"messages": "Hi"}', TEMPLATE, '"messages" must be a list of messages, not str'),
            ('{"messages": []}', TEMPLATE, '"messages" must be a list of messages, not []'),
            ('{"messages": ["Hi"]}', TEMPLATE, ", message 1: a message must be an object"),
            ('{"messages": [{"role": "user"}]}', TEMPLATE, ', message 1: no string under "content"'),
            ('{"conversations": [{"from": "gpt", "value": 3}]}', TEMPLATE, ', message 1: no string under "value"'),
            (ROWS[0], None, "has no chat template: give plain texts"),
            (ROWS[0], "{{ raise_exception('user first') }}", "chat template does not take it: user first"),
            ('{"messages": [', TEMPLATE, "not valid JSON"),
        ],
    )
    def test_what_cannot_be_written_is_named_with_its_line(self, tmp_path, row, template, reason):
        message = refusal(lambda: self.read(tmp_path, f"\n{row}\n", template))
        assert f"{tmp_path / 'a.jsonl'}, line 2" in message
        assert reason in message


class TestWindows:
    STREAM = torch.arange(1000)

    def test_calibration_windows_are_whole_disjoint_windows_in_stream_order(self):
        windows = mix_windows([self.STREAM], samples=20, window=30, seed=1)[0]
        starts = windows[:, 0]
        assert windows.shape == (20, 30)
        assert torch.equal(windows, starts[:, None] + torch.arange(30))
        assert (starts % 30 == 0).all()
        assert (starts.diff() >= 30).all()
        assert windows.max() < 990, "the tail of ten tokens is dropped"

    def test_the_seed_decides(self):
        first, again, other = (mix_windows([self.STREAM], samples=5, window=30, seed=seed)[0] for seed in (3, 3, 4))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)

    def test_evaluation_windows_from_the_start(self):
        assert cut_windows(self.STREAM, window=300).shape == (3, 300)
        assert torch.equal(cut_windows(self.STREAM, window=300, limit=1), torch.arange(300)[None])
        assert cut_windows(self.STREAM, window=300, limit=9).shape == (3, 300)

    @pytest.mark.parametrize(
        "cut",
        [
            lambda s, **frame: cut_windows(s, window=10, **frame),
            lambda s, **frame: mix_windows([s], samples=3, window=10, seed=0, **frame)[0],
        ],
    )
    def test_a_window_has_room_for_its_frame(self, cut):
        assert torch.equal(cut(torch.arange(26), frame=2), torch.arange(24).view(3, 8))
        start = "the text is too short for one window: it has "
        assert refusal(cut, torch.arange(7), frame=2) == f"{start}7 tokens, a window takes 8; give more text"
        assert refusal(cut, torch.arange(1)) == f"{start}1 tokens, a window takes 10; give more text"

    def test_a_shorter_window_is_offered_if_it_says_something(self):
        for tokens, offered in ((61, ""), (62, ", or say --window 64"), (97, ", or say --window 99")):
            message = refusal(cut_windows, torch.arange(tokens), window=100, frame=2)
            assert message.endswith(f"it has {tokens} tokens, a window takes 98; give more text{offered}")

    def test_fewer_windows_than_samples_are_all_used(self):
        for choose in ("random", "first"):
            windows = mix_windows([torch.arange(31)], samples=5, window=10, seed=0, choose=choose)[0]
            assert torch.equal(windows, torch.arange(30).view(3, 10))

    def test_several_streams_give_equal_shares_mixed_evenly(self):
        short, long, other = torch.zeros(6), torch.ones(200), torch.full((200,), 2.0)
        given = {"samples": 13, "window": 2, "seed": 0}
        windows, shares = mix_windows([short, long, other], **given)
        assert shares == [3, 5, 5]
        assert windows[:, 0].int().tolist() == [1, 2, 0, 1, 2, 0, 1, 2, 1, 2, 0, 1, 2]
        # What is skipped was dealt in the same way.
        first, second = (
            mix_windows([long.cumsum(0), other.cumsum(0)], window=2, seed=0, **skip)[0] for skip in SKIPPING
        )
        assert not {tuple(row) for row in first.tolist()} & {tuple(row) for row in second.tolist()}

    def test_senseless_numbers(self):
        assert refusal(cut_windows, self.STREAM, window=1) == "window must be at least 2 tokens, not 1"
        assert refusal(cut_windows, self.STREAM, window=9, limit=0) == "the limit of windows must be at least 1, not 0"
        assert refusal(mix_windows, [self.STREAM], samples=0, window=9, seed=0) == "samples must be at least 1, not 0"


def test_fingerprint_is_of_ids_and_shape():
    windows = torch.arange(6).view(2, 3)
    ids = b"".join(i.to_bytes(8, "little") for i in range(6))
    assert fingerprint_windows(windows) == hashlib.sha256(b"[2, 3]" + ids).hexdigest()
    assert fingerprint_windows(windows.t().contiguous().t()) == fingerprint_windows(windows)
    assert fingerprint_windows(windows.view(3, 2)) != fingerprint_windows(windows)
    assert fingerprint_windows(windows + 1) != fingerprint_windows(windows)
