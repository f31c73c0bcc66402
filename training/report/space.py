"""The Space of a published model: the page of `vaswani-demo` on the Hugging Face Hub."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from huggingface_hub import RepoCard

from vaswani_transformer import __version__
from vaswani_transformer.support.errors import UserError

APP = '''"""The page of a model; it runs the installed package, and no code of the model."""

from vaswani_transformer.demo import load_page

load_page("{repository}", revision={revision!r}).launch(run_history=False)
'''
CARD = Path(__file__).parent / "space_template.md"


def installed_version(package: str) -> str:
    """Return the version of an installed package as PyPI has it, without the name of a build such as "+cpu"."""
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError as error:
        fix = 'pip install -e ".[demo,train]" in the clone'
        raise UserError(
            f"--space: the Space gets the installed version of {package}; got none. Install it: {fix}."
        ) from error


def write_space(folder: Path, repository: str, revision: str | None = None, license: str = "apache-2.0") -> None:
    """Write the three files of the Space of a model into `folder`, with the versions that are installed here."""
    pins = {"vaswani-transformer": __version__} | {name: installed_version(name) for name in ("torch", "transformers")}
    settings = {"name": repository.partition("/")[2], "repository": repository, "license": license}
    text = CARD.read_text(encoding="utf-8").format(gradio=installed_version("gradio"), **settings)
    card = RepoCard(text)  # it reads the header
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "app.py").write_text(APP.format(repository=repository, revision=revision), encoding="utf-8")
    (folder / "requirements.txt").write_text(
        "".join(f"{name}=={pin}\n" for name, pin in pins.items()), encoding="utf-8"
    )
    card.save(folder / "README.md")
