"""The page as text: it stands alone, shows the run's own numbers, and escapes what a run wrote."""

from __future__ import annotations

import base64
import gzip
import json
import re
import string
from pathlib import Path
from typing import Any

import pytest

from roll.base.errors import ConfigError
from roll.report.command import report
from roll.report.history import MOST_LANES
from roll.report.page import MOST_POINTS, make_page
from roll.report.read import read_run
from roll.report.text import TEXTS
from tests.report.runs import group_line, long_run, sample, write_run

HOSTILE = '</script><script>document.title="taken"</script><b>"&\u202e\x00\ud800中文'


def payload(page: str) -> dict[str, Any]:
    found = re.search(r"<script type=(\S+) id=data>(.*?)</script>", page, re.DOTALL)
    assert found is not None
    text = found[2] if found[1] == "application/json" else gzip.decompress(base64.b64decode(found[2])).decode()
    values: dict[str, Any] = json.loads(text)
    return values


def test_it_requests_nothing_and_shows_the_numbers_of_the_run(tmp_path: Path) -> None:
    page = make_page([read_run(write_run(tmp_path))])
    assert not re.search(r"""(src|href)=["']?(?!#)|@import|url\(|fetch\(|XMLHttp""", page)
    assert "0.2 → 0.7" in page and "60 steps" in page and "ppo, grpo, ratio 1.0" in page and "1 min 1 s" in page
    values = payload(page)
    assert values["runs"][0]["step"] == list(range(61))
    assert values["runs"][0]["data"]["val/score"][::10] == pytest.approx(
        [0.2 + 0.5 * part / 6 for part in range(7)], rel=1e-4
    )
    shown = {name for chart in values["charts"] for name in chart["metrics"]}
    assert shown & {*values["runs"][0]["data"]} <= {*values["units"]}, "a chart has a metric without a unit"


def of_policies(row: dict[str, Any], part: float) -> None:
    row |= {"code/rollout/reward_mean": part, "math/rollout/reward_mean": 1 - part, "math/version": row["step"]}


def test_several_policies_are_shown_beside_their_run(tmp_path: Path) -> None:
    policies = {name: {"tags": [name]} for name in ("code", "math")}
    write_run(tmp_path, spoil=of_policies, config={"policies": policies}, groups=[group_line(1, 3)])
    for number, name in enumerate(policies):
        folder = tmp_path / "samples" / name
        folder.mkdir(parents=True)
        (folder / "step-000060.jsonl").write_text(json.dumps(sample(number, 1.0, 1.0, [number])) + "\n")
    page = report([tmp_path]).read_text()
    values = payload(page)
    assert [each["name"] for each in values["runs"]] == ["small", "small: code", "small: math"]
    whole, code, math = (each["data"] for each in values["runs"])
    assert code["rollout/reward_mean"][-1] == 1 and math["rollout/reward_mean"][-1] == 0
    assert "time/step" in whole and not {"time/step", "actor/loss"} & code.keys() and "version" in math
    assert [[step["groups"][0]["id"] for step in each] for each in values["samples"]] == [[], ["p0"], ["p1"]]
    assert [len(each) for each in values["histograms"]] == [3, 0, 3]
    assert page.count(TEXTS["samples_of_policies"][0]) == 1
    assert "differ" not in page[page.index("<section id=configuration") :].partition("</section>")[0]


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    rows = [sample(0, 1.0, 1.0, [1], prompt_id=HOSTILE, ground_truth=HOSTILE)]
    config = {"exp_name": HOSTILE, "source": {"given": ["exp_name"]}}
    events = [{"component": "x", "message": HOSTILE}]
    page = make_page([read_run(write_run(tmp_path, config=config, samples=rows, events=events))])
    assert "<script>document" not in page and "<b>&quot;" not in page
    assert payload(page)["samples"][0][0]["groups"][0]["id"] == HOSTILE


def test_equal_responses_are_one_row_and_groups_are_sorted_by_weight(tmp_path: Path) -> None:
    rows = [sample(0, 0.0, 0.1, [1, 2]), sample(0, 1.0, 0.1, [3]), sample(1, 1.0, 2.0, [4]), sample(1, 1.0, 2.0, [4])]
    (step,) = payload(make_page([read_run(write_run(tmp_path, samples=rows))]))["samples"][0]
    assert [group["id"] for group in step["groups"]] == ["p1", "p0"]
    assert [row["n"] for row in step["groups"][0]["rows"]] == [2]
    # weights: 2 tokens of 2 (1 - e^-0.6) against 3 tokens of 0.1 (1 - e^-0.6)
    assert step["groups"][0]["share"] == pytest.approx(4 / 4.3)
    assert step["groups"][1]["rows"][0]["lr"] == [-0.1, -0.1]


def test_a_long_run_of_many_engines_keeps_least_mean_and_largest_of_each_bucket_in_a_small_page(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    page = make_page([read_run(folder)])
    values = payload(page)
    (run,), norms = values["runs"], values["runs"][0]["data"]["actor/grad_norm"]
    assert len(run["step"]) <= MOST_POINTS + 3 and run["step"] == sorted(run["step"])
    at = norms.index(77.0)
    assert norms[at - 2 : at] == [1.0, pytest.approx(1 + 76 / 16, rel=1e-4)], "16 steps in a bucket"
    assert len(values["lanes"][0]["lanes"]) == MOST_LANES and TEXTS["lanes_left"][0].format(count=66 - 20) in page
    assert sum(len(row["tok"]) for group in values["samples"][0][0]["groups"] for row in group["rows"]) <= 24_000
    assert values["samples"][0][0]["left"] > 0 and len(page) < 1_500_000


def losses_alone(row: dict[str, Any], _: float) -> None:
    for name in [name for name in row if name not in ("step", "actor/loss", "actor/grad_norm", "time/step")]:
        del row[name]
    row["val/loss"] = 1.5


TURN = {"observation": HOSTILE, "text": "go left", "reward": 1.0, "versions": [3]}
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "killed": ({"status": None}, "running"),
    "agentic": ({"samples": [sample(0, 1.0, 0.5, [1, 2], episode={"turns": [TURN]})]}, "go left"),
    "sft": ({"spoil": losses_alone, "config": {"pipeline": "sft", "adv_estimator": ""}}, "Training loss"),
    "not finite": ({"spoil": lambda row, part: row.update({"actor/loss": None} if part > 0.5 else {})}, "not finite"),
    "keys as a number": ({"config": {"source": {"given": 5}}}, "0 keys given"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_every_kind_have_a_page(tmp_path: Path, kind: str) -> None:
    options, words = KINDS[kind]
    page = make_page([read_run(write_run(tmp_path, **options))])
    assert words in page + json.dumps(payload(page)) and "NaN" not in json.dumps(payload(page))


def test_several_runs_show_only_what_differs(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, config={"exp_name": name, "seed": seed}) for seed, name in enumerate("ab")]
    page = make_page([read_run(folder) for folder in folders])
    table = page[page.index("<table>") : page.index("</table>")]
    assert "seed" in table and "pg_variant" not in table
    assert len(payload(page)["runs"]) == 2
    with pytest.raises(ConfigError, match="9 runs; at most 8"):
        report(folders[:1] * 9)


def test_empty_states_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    page = make_page([read_run(tmp_path)])
    for key in ("no_steps", "no_samples", "no_config", "no_time"):
        assert TEXTS[key][0] in page


def test_both_languages_have_the_same_fields() -> None:
    for key, (english, chinese) in TEXTS.items():
        fields = [{name for _, name, _, _ in string.Formatter().parse(text) if name} for text in (english, chinese)]
        assert fields[0] == fields[1], key


def test_every_text_is_used() -> None:
    files = [
        path for path in Path("roll/report").rglob("*") if path.suffix in (".py", ".js") and path.name != "text.py"
    ]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    assert {*TEXTS} <= words


def test_the_command_writes_the_page_beside_the_run_or_says_why_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert report([folder]) == folder / "report.html" and (folder / "report.html").read_text().startswith("<!doctype")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--out"):
        report([folder], tmp_path / "file" / "page.html")
