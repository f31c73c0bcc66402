"""Publishing a run: what is checked before any work, the uploaded files, and interrupted uploads."""

import getpass
import json
import re
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, RepoCard, constants
from safetensors.torch import load_file, save_file

from tests.builders import tiny_marian
from tests.helpers import (
    BROKEN,
    ROOT,
    break_model,
    error_line,
    model_of_pairs,
    no_space,
    run_main,
    run_python,
    save,
    tiny_config,
    user_error,
)
from tests.hub_server import client_environment, serving
from tests.hub_state import Hub
from tests.training.invented_results import REPOSITORY, results_of
from tests.training.runs import FinishedRun, entries, equal, results_in, weights
from training import publish as publish_module
from training.publish import main, publish
from training.recipe.fields import load_recipe, to_dict
from training.report import space as space_module
from training.report.licenses import LICENSES
from training.report.results import NEEDED
from vaswani_transformer.support.errors import UserError

TOKEN = "hf_of_somebody"
RESULTS_PAGE = (ROOT / "docs" / "results-format.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["own", "a/b/c", "somebody/..", "-/own", "somebody/o wn"])
def test_invalid_name_of_a_repository_is_an_error(tmp_path: Path, name: str) -> None:
    with user_error(rf"^{re.escape(name)}: [^\n]*$"):
        publish(tmp_path, name)


def test_unfinished_run_is_an_error_of_one_line(tmp_path: Path) -> None:
    """Each file in turn is the next that the folder gets."""
    for name, content, message in (
        (None, "", r"holds no finished run.*for a mean of checkpoints, train with training\.average_last\."),
        ("recipe.yaml", "", r"holds no finished run; give the training command again to finish it\."),
        ("results.json", "{", r"results\.json: cannot be read .*"),
        ("results.json", '{"name": "own"}', r"results\.json: lacks commit, curve.*"),
        ("results.json", json.dumps(results_of()), r": has no config\.json, so it holds no model.*"),
    ):
        if name is not None:
            (tmp_path / name).write_text(content)
        with user_error(rf"^.*{message}$"):
            publish(tmp_path, REPOSITORY, dry_run=tmp_path / "dry")
    with user_error(r"^.*results\.json: has no results\.json.*$"):
        publish(tmp_path / "results.json", REPOSITORY, dry_run=tmp_path / "dry")
    with user_error(r"^x{256}: has no results\.json.*$"):  # not an error of the folder to write
        publish(Path("x" * 256), REPOSITORY, dry_run=tmp_path / "dry")
    assert not (tmp_path / "dry").exists()


def save_run(folder: Path) -> Path:
    """Save the model of pairs as a run with invented results."""
    save(folder, *model_of_pairs())
    results = results_of()
    tiny_config().make_generation_config(**results["recipe"]["decoding"]).save_pretrained(folder)
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def write_search(run: Path, text: str) -> None:
    (run / "generation_config.json").write_text(text)


def drop_search_of_results(run: Path) -> None:
    """Leave the search to the defaults, as the card does, and save another one."""
    results = results_of()
    del results["recipe"]["decoding"]
    (run / "results.json").write_text(json.dumps(results))
    write_search(run, '{"num_beams": 1}')


def replace_by_marian(run: Path) -> None:
    tiny_marian(vocab_size=len(model_of_pairs()[1])).save_pretrained(run)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: write_search(run, '{"num_beams": 4, "len'), r"generation_config\.json: cannot be read \("),
        (lambda run: (run / "generation_config.json").unlink(), r"run: has no generation_config\.json, .*; restore"),
        (lambda run: write_search(run, "{}"), r"run: num_beams in its generation_config\.json .* None, expected 4\."),
        (lambda run: write_search(run, '{"num_beams": 1}'), r"results\.json; got 1, expected 4\. Restore the file\.$"),
        (drop_search_of_results, r"results\.json; got 1, expected 4\. Restore the file\.$"),
        (replace_by_marian, r": is a model of another package; got MarianMTModel, expected one that a recip"),
    ],
)
def test_run_without_its_search_or_its_model_is_not_published(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(save_run(tmp_path / "run"))
    with user_error(message):
        publish(tmp_path / "run", REPOSITORY, dry_run=tmp_path / "dry")
    assert not (tmp_path / "dry").exists()


def test_broken_weights_are_not_published(saved: Path, tmp_path: Path) -> None:
    folder = break_model(saved, tmp_path / "run", "nan")
    (folder / "results.json").write_text(json.dumps(results_of()))
    with pytest.raises(UserError) as error:
        publish(folder, REPOSITORY, dry_run=tmp_path / "dry")
    assert str(error.value).startswith(f"{folder}: {BROKEN['nan']}")
    assert not (tmp_path / "dry").exists()


def test_dry_run_into_a_folder_that_is_not_empty_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results_of()))
    with user_error("is not empty; give another --dry_run"):
        publish(tmp_path, REPOSITORY, dry_run=tmp_path)


def test_folder_that_cannot_be_written_ends_the_command_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = save_run(tmp_path) / "results.json" / "dry"
    capsys.readouterr()  # the progress bar of saving
    message = "cannot be written: Not a directory; make room, or give another folder.\n"
    assert error_line(run_main(main, [tmp_path, REPOSITORY, f"--dry_run={dry}"], capsys)) == f"{dry}: {message}"


def test_failed_dry_run_leaves_no_file_and_the_same_command_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, dry = save_run(tmp_path / "run"), tmp_path / "dry"

    monkeypatch.setattr(publish_module, "make_card", no_space)
    with pytest.raises(OSError, match="No space left on device"):
        publish(run, REPOSITORY, dry_run=dry)
    monkeypatch.undo()
    assert not dry.exists()
    publish(run, REPOSITORY, dry_run=dry)
    assert {"README.md", "LICENSE-code", "model.safetensors", "tokenizer.json"} < {path.name for path in dry.iterdir()}


def test_space_has_its_header_and_pins_what_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    publish(save_run(tmp_path / "run"), REPOSITORY, license="mit", dry_run=tmp_path / "dry", space=True)
    space = tmp_path / "dry" / "space"
    assert {path.name for path in space.iterdir()} == {"README.md", "app.py", "requirements.txt"}
    header = RepoCard.load(space / "README.md").data.to_dict()
    assert (header["sdk"], header["sdk_version"], header["license"]) == ("gradio", version("gradio"), "mit")
    assert (header["models"], (space / header["app_file"]).exists()) == ([REPOSITORY], True)
    pins = dict(line.split("==") for line in (space / "requirements.txt").read_text().splitlines())
    assert pins["transformers"] == version("transformers")
    assert version("torch").startswith(pins["torch"])
    assert "+" not in pins["torch"]


@pytest.mark.parametrize("name", ["2024", "null", "1.5"])
def test_title_of_a_space_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(space_module, "version", lambda package: "6.1.0")
    space_module.write_space(tmp_path, f"somebody/{name}")
    assert RepoCard.load(tmp_path / "README.md").data.to_dict()["title"] == name


def test_space_without_gradio_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    run = save_run(tmp_path / "run")
    monkeypatch.setattr(space_module, "version", missing)
    with user_error(r"^--space: .* of torch; got none\. Install it: pip "):
        publish(run, REPOSITORY, dry_run=tmp_path / "dry", space=True)


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
    publish(finished_run.folder, REPOSITORY, dry_run=tmp_path / "dry")
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


@pytest.mark.slow
def test_docs_card_and_results_agree(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The docs' table has the keys of the file, the card's index its scores, and the published recipe its run."""
    publish(finished_run.folder, REPOSITORY, dry_run=tmp_path / "dry")
    results = results_in(finished_run.folder)
    table = RESULTS_PAGE.partition("| key | holds |")[2].partition("\n\n")[0]
    named = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == results.keys()
    assert named >= NEEDED
    examples = results["test"].pop("examples")
    assert results_in(tmp_path / "dry") == results
    card = ModelCard.load(tmp_path / "dry" / "README.md")
    assert {(one.dataset_split, one.metric_value) for one in card.data.eval_results if one.metric_type == "bleu"} == {
        (split, round(results[split]["bleu"], 2)) for split in ("validation", "test")
    }
    assert json.dumps(examples[0]["source"]) in card.text
    (command,) = re.findall(r"```bash\n(.*?)\n```", card.text, flags=re.DOTALL)
    program, *arguments = command.split(" recipe.yaml ")
    assert program == "python -m training.train"
    recipe = load_recipe(tmp_path / "dry" / "recipe.yaml", arguments[0].split())
    assert to_dict(recipe) == results["recipe"] | {"data": results["recipe"]["data"] | {"path": "FOLDER"}}


COMMANDS = """
import sys

from training.publish import main

main([*sys.argv[1:], "--revision=tried"])
for _ in range(2):  # the second time nothing has changed
    main([*sys.argv[1:], "--space"])
"""
CHECK_AND_APP = """
import runpy, sys

import gradio
from tests.published_release import main

main(sys.argv[2])
gradio.Blocks.launch = lambda page, **settings: print(page.title, settings)
runpy.run_path(sys.argv[1])
"""


@pytest.mark.slow
def test_run_is_published_in_one_commit_whose_example_runs_elsewhere(finished_run: FinishedRun, tmp_path: Path) -> None:
    hub = Hub()
    with serving(hub) as url:
        output = run_python(COMMANDS, str(finished_run.folder), REPOSITORY, **client_environment(url, tmp_path))
    commits = [hub.repositories[REPOSITORY].branches[branch] for branch in ("tried", "main", "main")]
    assert output.splitlines() == [f"Published {REPOSITORY}: {url}/{REPOSITORY}/commit/{commit}" for commit in commits]
    assert hub.messages(REPOSITORY, "tried") == ["Publish own"]
    assert hub.messages(REPOSITORY) == ["Publish own"]
    assert "POST /api/validate-yaml" in hub.requests
    (block,) = re.findall(r"```python\n(.*?)```", hub.files(REPOSITORY)["README.md"].decode(), flags=re.DOTALL)
    with serving(hub) as url:
        printed = run_python(
            f"import sys; sys.modules['vaswani_transformer'] = None\n{block}",
            folder=tmp_path,
            **client_environment(url, tmp_path / "home", token=None),
        )
    assert printed.startswith("[")
    assert hub.messages(f"spaces/{REPOSITORY}") == ["Publish own"]
    files = hub.files(f"spaces/{REPOSITORY}")
    assert files.keys() == {"README.md", "app.py", "requirements.txt"}
    (tmp_path / "app.py").write_bytes(files["app.py"])
    with serving(hub) as url:
        environment = client_environment(url, tmp_path / "reader", token=None)
        output = run_python(CHECK_AND_APP, str(tmp_path / "app.py"), REPOSITORY, **environment)
    assert output.endswith(f"{REPOSITORY} {{'run_history': False}}\n")
    assert output.count("\n") == 3  # a translation without the package, and one with it


UPLOADS = """
import json, sys, time
from pathlib import Path

from huggingface_hub import HfApi
from training.publish import upload
from vaswani_transformer.support.errors import UserError

folder, *servers = sys.argv[1:]
wait = time.sleep
time.sleep = lambda seconds: wait(seconds / 100)


def upload_to(server, folder=folder, token="hf_of_somebody", name="somebody/own", private=None):
    try:
        upload(HfApi(endpoint=server, token=token), Path(folder), name, private)
    except UserError as refused:
        return str(refused)


good = HfApi(endpoint=servers[-1], token="hf_of_somebody")
found = [[upload_to(server), sorted(good.list_repo_files("somebody/own"))] for server in servers]
for given in ({"private": True}, {"name": "another/own"}, {"token": "hf_of_nobody"}):
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
    first, damaged, closed, last, public, foreign, unknown, *sharded = json.loads(output)
    for error, files in (first, damaged, closed):
        assert error.startswith("somebody/own: the upload broke off (")
        assert "\n" not in error
        assert files == [".gitattributes"]
    assert "SHA-256 of the received content is" in damaged[0]
    assert last == [None, [".gitattributes", "config.json", "model.safetensors"]]
    assert hub.messages(REPOSITORY) == ["Publish a run"]
    (tmp_path / "found.safetensors").write_bytes(hub.files(REPOSITORY)["model.safetensors"])
    assert torch.equal(load_file(tmp_path / "found.safetensors")["weight"], torch.arange(9.0))
    assert public == "somebody/own: exists and is public; make it private on the Hub, or give another name."
    assert re.fullmatch(
        r"another/own: the Hub denied the upload \(.*403.*no rights to create .*\); log in with a token .*", foreign
    )
    assert re.fullmatch(r"somebody/own: the Hub denied the upload \(.*401.*\); log in with a token .*", unknown)
    assert sharded == [None, None]
    assert sorted(hub.files("somebody/sharded")) == sorted(["model.safetensors", "config.json", *kept])
    assert len(hub.messages("somebody/sharded")) == 2


TRAINER = """
import sys
from pathlib import Path

from training.recipe.fields import load_recipe
from tests.training.runs import prepare_run
from training.train import make_trainer

recipe = load_recipe(sys.argv[1], sys.argv[2:])
prepared = prepare_run(recipe)
trainer = make_trainer(recipe, prepared)
trainer.train()
trainer.args.hub_model_id = "somebody/midway"
trainer.push_to_hub("midway", private=True)
trainer.push_to_hub("in its own time", revision="later", blocking=False).result()
trainer.model.save_pretrained(prepared.folder / "plain")
assert not list((prepared.folder / "plain").glob("*.py"))
"""


@pytest.mark.slow
def test_trainer_pushes_the_model_as_it_is_with_its_code_and_a_card(arguments: list[str], tmp_path: Path) -> None:
    hub = Hub()
    more = ["--training.steps=3", f"--output_dir={tmp_path / 'run'}"]
    with serving(hub) as url:
        run_python(TRAINER, *arguments, *more, **client_environment(url, tmp_path / "home"))
    assert hub.repositories["somebody/midway"].private
    assert hub.messages("somebody/midway") == ["midway"]
    files = hub.files("somebody/midway")
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth")) or "checkpoint" in name]
    assert {"model.safetensors", "tokenizer.json", "model.py", "tokenizer.py"} < files.keys()
    assert "auto_map" in json.loads(files["config.json"])
    card = ModelCard(files["README.md"].decode())
    (score,) = card.data.get("eval_results")
    last = entries(json.loads(files["results.json"]), "eval_bleu")[-1]
    assert (score.dataset_split, score.metric_value) == ("validation", round(last["eval_bleu"], 2))
    assert str(tmp_path) not in "".join(files[name].decode() for name in files if name.endswith((".json", ".md")))
    assert "later" in hub.repositories["somebody/midway"].branches


@pytest.mark.parametrize(
    ("license", "hint"),
    [("apache", "perhaps apache-2.0"), ("Apache 2.0", "perhaps apache-2.0"), ("Ω", "one of its names")],
)
def test_license_unknown_to_the_hub_is_an_error_before_any_work(tmp_path: Path, license: str, hint: str) -> None:
    with pytest.raises(UserError, match=rf"^--license: the Hub knows no '{license}'; give one of its names.*") as end:
        publish(tmp_path / "nowhere", "somebody/model", license=license)
    assert hint in str(end.value)


def test_licenses_are_those_of_the_hub_without_repeats() -> None:
    assert {"apache-2.0", "mit", "cc-by-nc-sa-4.0", "openrail++", "gpl-3.0", "other"} <= set(LICENSES)
    assert len(LICENSES) == len(set(LICENSES))
