"""Publishing a run: what is checked before any work, the uploaded files, and interrupted uploads."""

import getpass
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file

from tests.helpers import (
    ROOT,
    error_line,
    model_of_pairs,
    run_main,
    run_python,
    save,
    tiny_config,
)
from tests.hub_server import client_environment, serving
from tests.hub_state import Hub
from tests.training.invented_results import REPOSITORY, results_of
from tests.training.runs import FinishedRun, equal, results_in, weights
from training.publish import main
from training.recipe import load_recipe, to_dict
from vaswani_transformer.generation import CallSettings
from vaswani_transformer.support.checked_loading import load_model

RESULTS_PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that gives the line with which a dry run ends, which leaves nothing."""

    def line_of(run: Path, *options: str) -> str:
        capsys.readouterr()  # the progress bar of saving
        line = error_line(run_main(main, [run, REPOSITORY, f"--dry_run={tmp_path / 'dry'}", *options], capsys))
        assert not (tmp_path / "dry").exists()
        return line

    return line_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save the model of pairs as a run with invented results."""
    folder = save(tmp_path / "run", *model_of_pairs())
    tiny_config().make_generation_config(num_beams=4, length_penalty=0.6).save_pretrained(folder)
    results = results_of()
    results["test"]["search"] = CallSettings(None, load_model(str(folder)), {}).search()
    (folder / "results.json").write_text(json.dumps(results))
    return folder


@pytest.mark.parametrize("content", [None, "{"])
def test_unfinished_run_is_an_error(tmp_path: Path, refused: Callable[..., str], content: str | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    assert re.search(r"results\.json: cannot be read \(.*\); give the training command again", refused(tmp_path))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "generation_config.json").write_text("{"), r"generation_config\.json: cannot be read \("),
        (lambda run: (run / "generation_config.json").unlink(), r"run: has no generation_config\.json"),
        (
            lambda run: tiny_config().make_generation_config(num_beams=5, length_penalty=0.6).save_pretrained(run),
            r"results\.json; got 5, expected 4\. Restore the file\.$",
        ),
    ],
)
def test_run_without_its_search_is_not_published(
    run: Path, refused: Callable[..., str], spoil: Callable[[Path], object], message: str
) -> None:
    spoil(run)
    assert re.search(message, refused(run))


def test_without_a_token_one_line_says_so_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client is offline, so any request would fail; there is no model, which the command would load next."""
    (tmp_path / "results.json").write_text(json.dumps(results_of()))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "")
    line = "There is no token of the Hugging Face Hub; log in with `hf auth login`, or set HF_TOKEN.\n"
    assert error_line(run_main(main, [tmp_path, REPOSITORY], capsys)) == line


@pytest.mark.slow
def test_dry_run_writes_all_that_would_be_published_and_nothing_of_the_machine(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """The docs' table has the keys of results.json, the card its scores, and the published recipe is its run's."""
    main([str(finished_run.folder), REPOSITORY, f"--dry_run={tmp_path / 'dry'}"])
    files = {path.name: path for path in (tmp_path / "dry").iterdir()}
    held = {"README.md", "LICENSE-code", "recipe.yaml", "results.json", "config.json", "generation_config.json"}
    held |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {name for name in files if not name.endswith(".py")} == held
    assert {"config.py", "model.py", "tokenizer.py"} < files.keys()
    assert equal(weights(tmp_path / "dry"), weights(finished_run.folder))
    for name in ("generation_config.json", "tokenizer.json"):
        assert json.loads(files[name].read_text()) == json.loads((finished_run.folder / name).read_text())
    folders = [str(path.parent) for path in (Path(finished_run.arguments[0]), finished_run.folder)]
    people = re.compile(rf"\b({re.escape(socket.gethostname())}|{re.escape(getpass.getuser())})\b")
    for name in held - {"model.safetensors", "LICENSE-code"}:
        text = files[name].read_text()
        assert not [secret for secret in (*folders, str(ROOT), str(Path.home())) if secret in text]
        assert not people.search(text)
    assert not [folder for folder in folders if folder.encode() in files["model.safetensors"].read_bytes()]

    results = results_in(finished_run.folder)
    table = RESULTS_PAGE.partition("| key | value |")[2].partition("\n\n")[0]
    named = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named - {"averaged_steps"} == results.keys()
    first = results["test"].pop("examples")[0]
    assert results_in(tmp_path / "dry") == results
    card = ModelCard.load(files["README.md"])
    assert {(one.dataset_split, one.metric_value) for one in card.data.eval_results if one.metric_type == "bleu"} == {
        (split, round(results[split]["bleu"], 2)) for split in ("validation", "test")
    }
    assert json.dumps(first["source"]) in card.text
    (command,) = re.findall(r"```bash\n(.*?)\n```", card.text, flags=re.DOTALL)
    program, arguments = command.split(" recipe.yaml ")
    assert program == "python -m training.train"
    recipe = load_recipe(files["recipe.yaml"], arguments.split())
    assert to_dict(recipe) == results["recipe"] | {"data": results["recipe"]["data"] | {"path": "FOLDER"}}


COMMANDS = """
import sys

from training.publish import main

main([*sys.argv[1:], "--revision=tried"])
for _ in range(2):  # the second time nothing has changed
    main(sys.argv[1:])
"""
RELEASE = "import sys; from tests.published_release import main; main(sys.argv[1])"


@pytest.mark.slow
def test_run_is_published_in_one_commit_whose_example_runs_elsewhere(finished_run: FinishedRun, tmp_path: Path) -> None:
    hub = Hub()
    with serving(hub) as url:
        output = run_python(COMMANDS, str(finished_run.folder), REPOSITORY, **client_environment(url, tmp_path))
    commits = [hub.repositories[REPOSITORY].branches[branch] for branch in ("tried", "main", "main")]
    assert output.splitlines() == [f"Published {REPOSITORY}: {url}/{REPOSITORY}/commit/{commit}" for commit in commits]
    assert hub.messages(REPOSITORY, "tried") == ["Publish a run"]
    assert hub.messages(REPOSITORY) == ["Publish a run"]
    assert "POST /api/validate-yaml" in hub.requests
    (block,) = re.findall(r"```python\n(.*?)```", hub.files(REPOSITORY)["README.md"].decode(), flags=re.DOTALL)
    with serving(hub) as url:
        printed = run_python(
            f"import sys; sys.modules['vaswani_transformer'] = None\n{block}",
            folder=tmp_path,
            **client_environment(url, tmp_path / "home", token=None),
        )
    assert printed.startswith("[")
    with serving(hub) as url:
        environment = client_environment(url, tmp_path / "reader", token=None)
        output = run_python(RELEASE, REPOSITORY, **environment)
    assert output.count("\n") == 2  # a translation without the package, and one with it


UPLOADS = """
import functools, json, sys, time
from pathlib import Path

from huggingface_hub import HfApi
from training import publish
from vaswani_transformer.support.errors import UserError

folder, *servers = sys.argv[1:]
wait = time.sleep
time.sleep = lambda seconds: wait(seconds / 100)


def upload_to(server, folder=folder, token="hf_of_somebody", name="somebody/own", private=None):
    publish.HfApi = functools.partial(HfApi, endpoint=server, token=token)
    try:
        publish.upload(Path(folder), name, private, None)
    except UserError as refused:
        return str(refused)


good = HfApi(endpoint=servers[-1], token="hf_of_somebody")
found = [[upload_to(server), sorted(good.list_repo_files("somebody/own"))] for server in servers]
for given in ({"private": True}, {"name": "another/own"}, {"token": "hf_of_nobody"}, {"name": "a/b/c"}):
    found.append(upload_to(servers[-1], **given))
for version in ("old", "new"):
    found.append(upload_to(servers[-1], f"{folder}-{version}", name="somebody/sharded"))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_interrupted_upload_shows_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    """The server stops while weights arrive, then at the commit; then a bit changes on the way; then all succeeds.

    A new upload replaces only weights and code. The client waits for a stopped server, here a hundredth of its time.
    """
    folder, hub, kept = tmp_path / "folder", Hub(), ["notes.md", "samples/one.txt"]
    folder.mkdir()
    save_file({"weight": torch.arange(9.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    old = ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "old.py", "training_args.bin", *kept]
    for turn, files in {"old": old, "new": ["model.safetensors", "config.json"]}.items():
        for path in (tmp_path / f"folder-{turn}" / name for name in files):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{turn} {path.name}")
    with (
        serving(hub, dies_at="PUT /lfs") as dying,
        serving(hub, spoils_uploads=True) as spoiling,
        serving(hub, dies_at="/commit/") as closing,
        serving(hub) as good,
    ):
        environment = client_environment(good, tmp_path / "home")
        output = run_python(UPLOADS, str(folder), dying, spoiling, closing, good, **environment)
    first, damaged, closed, last, public, foreign, unknown, invalid, *sharded = json.loads(output)
    for error, files in (first, damaged, closed):
        assert error.startswith("somebody/own: not uploaded (")
        assert "\n" not in error
        assert files == [".gitattributes"]
    assert last == [None, [".gitattributes", "config.json", "model.safetensors"]]
    assert hub.messages(REPOSITORY) == ["Publish a run"]
    (tmp_path / "found.safetensors").write_bytes(hub.files(REPOSITORY)["model.safetensors"])
    assert torch.equal(load_file(tmp_path / "found.safetensors")["weight"], torch.arange(9.0))
    assert public == "somebody/own: exists and is public; make it private on the Hub, or give another name."
    assert re.match(r"another/own: not uploaded \(.*403.*no rights to create .*\); the repository shows all", foreign)
    assert re.match(r"somebody/own: not uploaded \(.*401.*\); the repository shows all", unknown)
    assert re.match(r"a/b/c: not uploaded \(", invalid)
    assert sharded == [None, None]
    assert sorted(hub.files("somebody/sharded")) == sorted(["model.safetensors", "config.json", *kept])
    assert len(hub.messages("somebody/sharded")) == 2
