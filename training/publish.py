"""Publish a finished run on the Hugging Face Hub: `python -m training.publish RUN OWNER/NAME [--private]`.

One commit has the run's weights, tokenizer, generation settings, `results.json`, `recipe.yaml`, the card, and the
model's code. So the model loads without this package. `--dry_run=FOLDER` writes the same files into a folder.
"""

import argparse
import json
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from transformers.utils.logging import disable_progress_bar

from training.card import make_card, read_results
from training.recipe import to_yaml
from training.train import RESULTS
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.settings import CallSettings
from vaswani_transformer.support.command import CommandParser, UserError, exit_on_user_error, one_line
from vaswani_transformer.support.files import atomic_folder, write_errors
from vaswani_transformer.support.loading import load_model, load_tokenizer

LICENSE = Path(__file__).parent.parent / "LICENSE"
REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py", "training_args.bin"]  # of an earlier commit


def write_repository(folder: Path, results: dict[str, Any], options: argparse.Namespace) -> None:
    """Write every file of a repository into `folder`; no pickle, and no name of a machine or user.

    The texts of the test set may be private, so `results.json` has only its scores, and the card one sentence, or with
    `--private` none.
    """
    run = options.run
    model = load_model(str(run), local_files_only=True)
    tokenizer = load_tokenizer(str(run), local_files_only=True)

    # The scores are those of this search, or `training.score --save` chose it.
    search = CallSettings(None, model, {}).search()
    if "test" in results and (scored := results.get("chosen_search", results["test"]["search"])) != search:
        names = sorted(scored.keys() | search.keys())
        name = next(name for name in names if search.get(name) != scored.get(name))
        raise UserError(
            f"{run}: {name} in its generation_config.json is not that of {RESULTS}; got {search.get(name)!r}, "
            f"expected {scored.get(name)!r}. Restore the file."
        )
    model.with_remote_code().save_pretrained(folder)
    if isinstance(tokenizer, VaswaniTransformerTokenizer):  # Transformers has the code of others
        tokenizer = tokenizer.with_remote_code()
    tokenizer.save_pretrained(folder)

    # The card gets at most one example, and `results.json` none.
    card = make_card(results, options.repository, options.license, has_example=not options.private)
    card.save(folder / "README.md")
    if "test" in results:
        scores = {name: score for name, score in results["test"].items() if name != "examples"}
        results = {**results, "test": scores}
    (folder / RESULTS).write_text(json.dumps(results, indent=2, ensure_ascii=False), encoding="utf-8")
    (folder / "recipe.yaml").write_text(to_yaml(results["recipe"]), encoding="utf-8")
    (folder / "LICENSE-code").write_bytes(LICENSE.read_bytes())


def upload(folder: Path, repository: str, private: bool | None, revision: str | None) -> str:
    """Upload a folder in one commit, which also deletes weights and code of an earlier one; return its address.

    The Hub's `upload_folder` makes several commits where Xet is installed, so readers could load half of a model.
    """
    api = HfApi()
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.repo_info(repository).private:
            raise UserError(f"{repository}: exists and is public; make it private on the Hub, or choose a new name.")
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        old_files = set(api.list_repo_files(repository, revision=revision)) - files.keys()
        stale = [name for name in sorted(old_files) if any(fnmatch(name, pattern) for pattern in REPLACED)]
        changes: list[CommitOperationAdd | CommitOperationDelete] = []
        changes += [CommitOperationAdd(name, path) for name, path in files.items()]
        changes += [CommitOperationDelete(name) for name in stale]
        commit = api.create_commit(repository, changes, commit_message="Publish a run", revision=revision)
        return str(commit.commit_url)
    except UserError:
        raise
    except Exception as error:  # of the client, of HTTP, of the network
        raise UserError(
            f"{repository}: upload failed ({one_line(error)}); nothing was published. Check your token, and "
            "rerun the command."
        ) from error


def publish(options: argparse.Namespace) -> str:
    """Publish a finished run, or write the files into a folder; return the address or folder."""
    results = read_results(options.run)
    if options.dry_run is not None:
        with atomic_folder(options.dry_run) as staging:
            write_repository(staging, results, options)
        return str(options.dry_run)
    if get_token() is None:
        raise UserError("No token of the Hugging Face Hub was found; log in with `hf auth login`, or set HF_TOKEN.")
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), results, options)
        return upload(Path(folder), options.repository, options.private, options.revision)


def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(
        prog="python -m training.publish",
        description="Publish a finished run on the Hugging Face Hub.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("repository", help="the repository, OWNER/NAME; created if it does not exist")
    private_help = "make the repository private, and show no test sentence on the card"
    parser.add_argument("--private", action="store_true", default=None, help=private_help)
    parser.add_argument("--revision", help="the branch to publish on; created if it does not exist (main)")
    parser.add_argument("--license", help="the Hub's name for the weights' license, such as apache-2.0 (none)")
    parser.add_argument("--dry_run", type=Path, help="write the files into this folder and upload nothing")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    what_now = "; what the repository shows is complete"
    with exit_on_user_error(what_now=what_now), write_errors(options.run, "make room, or choose a different folder"):
        address = publish(options)
        print(f"{'Wrote' if options.dry_run else 'Published'} {options.repository}: {address}")


if __name__ == "__main__":
    main()
