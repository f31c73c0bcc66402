"""Publish a finished run on the Hugging Face Hub: `python -m training.publish RUN OWNER/NAME [--private] [--space]`.

One commit has the run's weights, tokenizer, generation settings, `results.json`, `recipe.yaml`, the card, and the
model's code. So the model loads without this package. `--space` adds a Space with the page of `vaswani-demo`.
`--dry_run=FOLDER` writes the same files into a folder.
"""

import fnmatch
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from training.report.card import make_card
from training.report.licenses import check_license
from training.report.results import RESULTS, read_results, recipe_of, results_errors, to_json_values
from training.report.space import write_space
from training.run.checkpoints import RECIPE
from training.run.command import check_empty, flush_stdout
from vaswani_transformer import VaswaniTransformerTokenizer
from vaswani_transformer.body import ProjectedModel
from vaswani_transformer.generation_settings import CallSettings
from vaswani_transformer.support.checked_loading import check_tokenizer_fits, load_model, load_tokenizer
from vaswani_transformer.support.command_line import ArgumentParser
from vaswani_transformer.support.errors import UserError, exit_on_user_error, one_line
from vaswani_transformer.support.files import staged_files, write_errors

LICENSE = Path(__file__).parent.parent / "LICENSE"
REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.py", "training_args.bin")


def finished_results(run: Path) -> dict[str, Any]:
    if os.path.exists(run / RESULTS):
        return read_results(run / RESULTS)
    fix = "give the folder of a run; for a mean of checkpoints, train with training.average_last"
    fix = "give the training command again to finish it" if os.path.exists(run / RECIPE) else fix
    raise UserError(f"{run}: has no {RESULTS}, so it holds no finished run; {fix}.")


def load_run(run: Path) -> tuple[ProjectedModel, PreTrainedTokenizerBase]:
    model = load_model(str(run), local_files_only=True)
    tokenizer = load_tokenizer(str(run), local_files_only=True)
    check_tokenizer_fits(model, tokenizer, str(run))
    if not isinstance(model, ProjectedModel):
        raise UserError(
            f"{run}: is a model of another package; got {type(model).__name__}, expected one that a recipe trains. "
            "Name the folder of a run."
        )
    return model, tokenizer


def check_search(run: Path, model: ProjectedModel, tokenizer: PreTrainedTokenizerBase, results: dict[str, Any]) -> None:
    """Check that a run's folder has the search by which its results were scored, as the card says."""
    recipe = recipe_of(results)
    search = CallSettings(recipe.generation_config(model.config, tokenizer), model, {}).search()
    scored, saved = results.get("test", {}).get("search", search), CallSettings(None, model, {}).search()
    for name in (*recipe.search, *scored, *saved):
        if saved.get(name) != scored.get(name):
            raise UserError(
                f"{run}: {name} in its generation_config.json is not that of {RESULTS}; got {saved.get(name)!r}, "
                f"expected {scored.get(name)!r}. Restore the file."
            )


def write_repository(
    folder: Path,
    model: ProjectedModel,
    tokenizer: PreTrainedTokenizerBase,
    results: dict[str, Any],
    repository: str,
    license: str = "apache-2.0",
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write every file of a repository into `folder`; no pickle, and no name of a machine or user.

    `weights` are those of a model that is sharded.

    The texts of the test set may be private, so `results.json` has only its scores, and the card one sentence and its
    output.
    """
    model.with_remote_code().save_pretrained(folder, state_dict=weights)
    if isinstance(tokenizer, VaswaniTransformerTokenizer):  # Transformers has the code of others
        tokenizer = tokenizer.with_remote_code()
    tokenizer.save_pretrained(folder)
    make_card(results, repository, license).save(folder / "README.md")
    if "test" in results:
        results = results | {"test": {name: of for name, of in results["test"].items() if name != "examples"}}
    text = json.dumps(to_json_values(results), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / RESULTS).write_text(text, encoding="utf-8")
    recipe = yaml.safe_dump(results["recipe"], allow_unicode=True, sort_keys=False)
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    (folder / "LICENSE-code").write_bytes(LICENSE.read_bytes())


def upload(
    api: HfApi,
    folder: Path,
    repository: str,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Publish a run",
    repo_type: str = "model",
) -> CommitInfo:
    """Upload a folder in one commit, which also deletes weights and code of an earlier one.

    `upload_folder` may make several commits, so that half of a model is visible.
    """
    try:
        sdk = "gradio" if repo_type == "space" else None
        created = api.create_repo(repository, private=private, exist_ok=True, repo_type=repo_type, space_sdk=sdk)
        repository = created.repo_id
        if private and not api.repo_info(repository, repo_type=repo_type).private:
            raise UserError(f"{repository}: exists and is public; make it private on the Hub, or give another name.")
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True, repo_type=repo_type)
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        there = set(api.list_repo_files(repository, revision=revision, repo_type=repo_type)) - files.keys()
        stale = [name for name in sorted(there) if any(fnmatch.fnmatch(name, pattern) for pattern in REPLACED)]
        additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        deletions = [CommitOperationDelete(path_in_repo=name, is_folder=False) for name in stale]
        changes = [*additions, *deletions]
        return api.create_commit(repository, changes, commit_message=message, revision=revision, repo_type=repo_type)
    except UserError:
        raise
    except Exception as error:  # of the client, of HTTP, of the network
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise UserError(
                f"{repository}: the Hub denied the upload ({error_chain(error)}); log in with a token that may write "
                "there."
            ) from error
        raise UserError(
            f"{repository}: the upload broke off ({error_chain(error)}). The repository shows the complete upload or "
            "nothing of it; give the same command again."
        ) from error


def error_chain(error: BaseException) -> str:
    """Return the messages of an error and its causes on one line."""
    reasons = []
    cause: BaseException | None = error
    while cause is not None:
        reason = re.sub(r" ?For more information check: \S+", "", one_line(cause, is_complete=True)).rstrip(".")
        if not any(reason in before for before in reasons):
            reasons.append(reason)
        cause = cause.__cause__
    return ": ".join(reasons)


def check_name(repository: str) -> None:
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"{repository}: no name of a repository: {error_chain(error)}") from error
    if "/" not in repository:
        raise UserError(f"{repository}: lacks its owner; write it as OWNER/{repository}.")


def publish(
    run: Path,
    repository: str,
    private: bool | None = None,
    revision: str | None = None,
    license: str = "apache-2.0",
    dry_run: Path | None = None,
    space: bool = False,
) -> str:
    """Publish a finished run, or write what would be published into the folder `dry_run`; return where it is.

    The run, the name, the license, the token and the folder are checked before any work.
    """
    check_name(repository)
    check_license(license)
    results = finished_results(run)
    with results_errors(run / RESULTS):
        make_card(results, repository, license)
    if dry_run is None and get_token() is None:
        raise UserError("There is no token of the Hugging Face Hub; log in with `hf auth login`, or set HF_TOKEN.")
    if dry_run is not None:
        check_empty(dry_run, "--dry_run")
    model, tokenizer = load_run(run)
    check_search(run, model, tokenizer, results)
    if dry_run is not None:
        with staged_files(dry_run) as staging:
            write_repository(staging, model, tokenizer, results, repository, license)
            if space:
                write_space(staging / "space", repository, revision, license)
        return str(dry_run)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as space_folder:
        if space:  # first, since it can lack a package
            write_space(Path(space_folder), repository, revision, license)
        write_repository(Path(folder), model, tokenizer, results, repository, license)
        message = f"Publish {results['name']}"
        address = upload(HfApi(), Path(folder), repository, private, revision, message).commit_url
        if space:
            upload(HfApi(), Path(space_folder), repository, private, message=message, repo_type="space")
        return address


def main(arguments: list[str] | None = None) -> None:
    parser = ArgumentParser(
        prog="python -m training.publish", description="Publish a finished run on the Hugging Face Hub."
    )
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("repository", help="the repository, OWNER/NAME; made if it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="make the repository private")
    parser.add_argument("--revision", help="the branch to publish on; made if it does not exist (main)")
    parser.add_argument("--license", default="apache-2.0", help="the Hub's name for the weights' license (apache-2.0)")
    parser.add_argument("--space", action="store_true", help="also publish a Space of that name, where the model runs")
    parser.add_argument("--dry_run", type=Path, help="write the files into this folder and upload nothing")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    disable_progress_bar()
    folder = options.dry_run or tempfile.gettempdir()
    interrupted = "; what the repository shows is complete"
    with exit_on_user_error(what_now=interrupted), write_errors(folder, "make room, or give another folder"):
        address = publish(**vars(options))
        with flush_stdout(f"the files are at {address}"):
            print(f"{'Wrote' if options.dry_run else 'Published'} {options.repository}: {address}")


if __name__ == "__main__":
    main()
