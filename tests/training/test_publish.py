"""Publishing a run: what is checked before any work, the uploaded files, and uploads that fail."""

import ast
import getpass
import gzip
import json
import re
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelCard, constants

from tests import ROOT
from tests.commands import error_line, run_main, run_python, user_error
from tests.hub import Hub, client_environment, serving
from tests.models import model_of_pairs, save, tiny_config
from tests.published import PUBLISHED_FILES, assert_same_results, load_without_the_package
from tests.training.invented_results import REPOSITORY, results_of
from tests.training.runs import LANGUAGE, SPLITS, FinishedRun, equal, results_in, train_in, weights
from training import publish as publish_module
from training.publish import main, upload
from training.recipe import load_recipe, to_dict
from vaswani_transformer.settings import CallSettings
from vaswani_transformer.support.loading import load_model

FIELDS_PAGE = (ROOT / "docs" / "fields.md").read_text(encoding="utf-8")
RECIPES_OF_THE_PAGE = {
    "ctc": "multi30k-ctc",
    "glat": "multi30k-glat",
    "cmlm": "multi30k-cmlm",
    "iterative-vae": "multi30k-iterative-vae",
    "student": "multi30k-student",
}
TINY_FIELDS = [  # of runs of two steps
    *("--tokenizer.vocab_size=280", "--model.d_model=16", "--model.d_ff=16", "--model.num_heads=2"),
    *("--training.steps=2", "--training.evaluation_steps=2", "--training.checkpoint_steps=2"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save the model of pairs as a run with invented results."""
    folder = save(tmp_path / "run", *model_of_pairs())
    tiny_config().make_generation_config(num_beams=4, length_penalty=0.6).save_pretrained(folder)
    results = results_of()
    results["test"]["search"] = CallSettings(None, load_model(str(folder)), {}).search()
    (folder / "results.json").write_text(json.dumps(results))
    return folder


UNFINISHED = r"results\.json: cannot be read \(.*\); rerun the training command"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("results.json", None, UNFINISHED),
        ("results.json", "{", UNFINISHED),
        ("results.json", "{}", r"results\.json: is damaged; got None for name; rerun the training command"),
        ("generation_config.json", None, r"run: generation_config\.json is missing"),
        ("generation_config.json", "{", r"generation_config\.json: cannot be read \("),
        ("generation_config.json", '{"num_beams": 5}', r"results\.json; got .*, expected .*\. Restore the file\.$"),
    ],
)
def test_run_that_is_unfinished_or_without_its_search_is_not_published(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    capsys.readouterr()  # the progress bar of saving
    line = error_line(run_main(main, [run, REPOSITORY, f"--dry_run={tmp_path / 'dry'}"], capsys))
    assert re.search(message, line)
    assert not (tmp_path / "dry").exists()


def test_search_that_was_chosen_on_the_validation_set_is_published_and_named(run: Path, tmp_path: Path) -> None:
    tiny_config().make_generation_config(num_beams=5, length_penalty=1.0).save_pretrained(run)
    results = json.loads((run / "results.json").read_text())
    search = CallSettings(None, load_model(str(run)), {}).search()
    (run / "results.json").write_text(json.dumps(results | {"chosen_search": search}))
    main([str(run), REPOSITORY, f"--dry_run={tmp_path / 'dry'}"])
    text = (tmp_path / "dry" / "README.md").read_text(encoding="utf-8")
    assert re.search(r"length_penalty 0\.6.*num_beams 4: BLEU 28\.46", text)
    chosen = "- `generation_config.json` has a different search, the best one on the validation set: "
    assert re.search(re.escape(chosen) + r".*num_beams 5", text)


def test_card_of_a_private_repository_has_no_sentence_of_the_test_set(run: Path, tmp_path: Path) -> None:
    for number, options in enumerate(([], ["--private", "--license=mit"])):
        main([str(run), REPOSITORY, f"--dry_run={tmp_path / str(number)}", *options])
    public, private = ((tmp_path / f"{number}" / "README.md").read_text(encoding="utf-8") for number in range(2))
    assert ("first test sentence" in public, "license: " in public) == (True, False)
    assert ("first test sentence" in private, "license: mit\n" in private) == (False, True)


def test_without_a_token_one_line_says_so_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client is offline, so any request would fail; there is no model, which the command would load next."""
    (tmp_path / "results.json").write_text(json.dumps(results_of()))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "")
    line = "No token of the Hugging Face Hub was found; log in with `hf auth login`, or set HF_TOKEN.\n"
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
    table = FIELDS_PAGE.partition("| key | value |")[2].partition("\n\n")[0]
    named = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named - {"averaged_steps", "chosen_search"} == results.keys()
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
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_run_is_published_in_one_commit_whose_example_runs_elsewhere(finished_run: FinishedRun, tmp_path: Path) -> None:
    hub = Hub()
    with serving(hub) as url:
        output = run_python(COMMANDS, str(finished_run.folder), REPOSITORY, **client_environment(url, tmp_path))
        (block,) = re.findall(r"```python\n(.*?)```", hub.at(REPOSITORY).files["README.md"].decode(), flags=re.DOTALL)
        code = f"import sys; sys.modules['vaswani_transformer'] = None\n{block}"
        printed = run_python(code, folder=tmp_path, **client_environment(url, tmp_path / "home"))
    commits = [hub.at(REPOSITORY, branch).sha for branch in ("tried", "main")]
    assert output.splitlines() == [f"Published {REPOSITORY}: {url}/{REPOSITORY}/commit/{commit}" for commit in commits]
    assert hub.messages(REPOSITORY, "tried") == hub.messages(REPOSITORY) == ["Publish a run"]
    by_model, by_pipeline = map(ast.literal_eval, printed.splitlines())
    assert [{"translation_text": by_model[0]}] == by_pipeline


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace the Hub's client."""
    client = Mock()
    monkeypatch.setattr(publish_module, "HfApi", lambda: client)
    return client


def test_upload_is_one_commit_that_deletes_only_earlier_weights_and_code(api: Mock, tmp_path: Path) -> None:
    new, kept = ["config.json", "model.safetensors"], ["notes.md", "samples/one.txt"]
    old = ["model-00001-of-00001.safetensors", "model.safetensors.index.json", "old.py", "training_args.bin"]
    for name in new:
        (tmp_path / name).write_text("new")
    api.list_repo_files.return_value = [*kept, *old, "config.json"]
    assert upload(tmp_path, REPOSITORY, None, None) == str(api.create_commit.return_value.commit_url)
    ((_, changes), _) = api.create_commit.call_args
    assert [change.path_in_repo for change in changes if isinstance(change, CommitOperationAdd)] == new
    assert [change.path_in_repo for change in changes if isinstance(change, CommitOperationDelete)] == old


@pytest.mark.parametrize("step", ["create_repo", "list_repo_files", "create_commit"])
def test_failed_upload_is_an_error_of_one_line(step: str, api: Mock, tmp_path: Path) -> None:
    api.list_repo_files.return_value = []
    getattr(api, step).side_effect = OSError("403 Forbidden\nno rights")
    with user_error(r"^somebody/own: upload failed \(.*403.*\); nothing was published\."):
        upload(tmp_path, REPOSITORY, None, None)


def test_public_repository_gets_no_private_model(api: Mock, tmp_path: Path) -> None:
    api.repo_info.return_value.private = False
    with user_error("^somebody/own: exists and is public; make it private on the Hub, or choose a new name"):
        upload(tmp_path, REPOSITORY, True, None)
    api.create_commit.assert_not_called()


PAGE = (ROOT / "docs" / "publishing.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_model_of_the_page_is_published_with_code_that_loads_it_without_the_package(tmp_path: Path) -> None:
    """The runs have two steps of the recipes that the page names, and its commands publish them into folders."""
    data = tmp_path / "data"
    data.mkdir()
    for split in SPLITS:
        pairs = "".join(f"{json.dumps({'en': text, 'de': text[::-1]})}\n" for text in LANGUAGE)
        (data / f"{split}.jsonl.gz").write_bytes(gzip.compress(pairs.encode()))
    pattern = r"^python -m training\.publish runs/(\S+) (OWNER/\S+)\s+(?:\\\n\s+)?--dry_run=(\S+)$"
    commands = re.findall(pattern, PAGE, flags=re.MULTILINE)
    assert [name for name, *_ in commands] == list(RECIPES_OF_THE_PAGE)

    published = []
    for name, repository, folder in commands:
        recipe = str(ROOT / "training" / "recipes" / f"{RECIPES_OF_THE_PAGE[name]}.yaml")
        train_in([recipe, f"--data.path={data}", *TINY_FIELDS], tmp_path / "runs" / name)
        main([str(tmp_path / "runs" / name), repository, f"--dry_run={tmp_path / folder}"])
        kind = {"student": "autoregressive", "glat": "nat"}.get(name, name.replace("-", "_"))
        code = {path.name for path in (tmp_path / folder).glob("*.py")}
        assert code == PUBLISHED_FILES[kind]
        published.append(tmp_path / folder)
    loaded = load_without_the_package(tmp_path / "home", *((str(folder), "main") for folder in published))
    for results, folder in zip(loaded, published, strict=True):
        assert_same_results(results, folder)
