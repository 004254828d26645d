"""``pipespec recommend``: its candidates, the table, and a run on the bundled family."""

import json

import pytest

from pipespec.cli.main import main
from pipespec.cli.recommend import Candidate, candidates, read_prompts, table


def test_candidates_are_none_the_index_each_draft_and_pairs() -> None:
    assert candidates({"large": 9, "small": 2}) == [
        (), ("ngram",), ("small",), ("large",), ("ngram", "small"), ("ngram", "large"), ("small", "large"),
    ]  # fmt: skip
    assert candidates({}) == [(), ("ngram",)]


def test_a_run_on_the_bundled_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--new-tokens", "4", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = {tuple(name.rpartition("/")[2] for name in c["drafts"]): c for c in record["candidates"]}
    assert set(found) == set(candidates({"small": 1, "medium": 2}))
    assert found[()]["acceptance"] is None
    assert found[()]["speedup"] == 1.0
    assert all(c["acceptance"] is None or 0.0 <= c["acceptance"] <= 1.0 for c in found.values())
    assert [c["rate"] for c in record["candidates"]] == sorted((c["rate"] for c in found.values()), reverse=True)
    assert record["code"].startswith("pipe = pipespec.Pipeline('")
    compile(record["code"], "code", "exec")


def test_the_table_and_the_code() -> None:
    plain = Candidate((), 90.0)
    best = Candidate(("a/small", "b/large"), 180.0, 0.9)
    shown = table([best, plain, Candidate(("ngram",), 81.0, 0.25)], plain, best).splitlines()
    assert shown[1].split() == ["->", "small", "+", "large", "0.90", "180.0", "2.00x"]
    assert shown[3].split() == ["ngram", "0.25", "81.0", "0.90x"]
    assert shown[-1] == "drafting pays"
    assert table([plain], plain, plain).endswith("do not draft: no candidate reaches 1.05x of plain decoding")
    assert best.code("t", "float32") == (
        "pipe = pipespec.Pipeline('t', drafts=['a/small', 'b/large'], schedule='lockstep', dtype='float32')"
    )
    assert plain.code("t", "auto") == "pipe = pipespec.Pipeline('t', schedule='plain')"


def test_prompts_are_a_text_or_json_lines(tmp_path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one text\nof two lines\n")
    assert read_prompts(file) == ["one text\nof two lines"]
    file = tmp_path / "prompts.jsonl"
    records = ["a", {"prompt": "b"}, {"id": 1, "question": "c"}, {"turns": ["d", "then"]}, {"text": "one too many"}]
    file.write_text("\n".join(map(json.dumps, records)))
    assert read_prompts(file) == ["a", "b", "c", "d"]
    for wrong in ("{", "3", "{}", '{"prompt": 3}', '{"turns": []}', '{"prompt": " "}'):
        file.write_text(f'"a"\n{wrong}')
        with pytest.raises(ValueError, match=r"jsonl, entry 2, is no prompt: a string, or an object with prompt"):
            read_prompts(file)


def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["recommend", "--draft", str(tmp_path / "none"), "--new-tokens", "2"]) == 2
    assert main(["recommend", "--new-tokens", "100000"]) == 2
    assert "pass the target's limit" in capsys.readouterr().err
