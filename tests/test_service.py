"""The service of examples/ translates in both engines, refuses what it must refuse, and ends gracefully."""

import asyncio
import contextlib
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.command_parsers import commands_of
from tests.models import EVERY_FAMILY, PAIRS, family_of_pairs, model_of_pairs, save, tiny_model
from vaswani_transformer.convert.ctranslate2_exporter import to_ctranslate2
from vaswani_transformer.tokenizer import SPACES, source_encoder

for package in ("ctranslate2", "starlette", "uvicorn"):
    pytest.importorskip(package)

FOLDER = ROOT / "examples" / "service"
SERVICE = runpy.run_path(str(FOLDER / "service.py"))
DEFAULTS = SERVICE["parse_arguments"](["model"])
LONG = "the cat is black. " * 300  # a second of work or more


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of the model of pairs for each engine."""
    model, tokenizer = model_of_pairs()
    folder = tmp_path_factory.mktemp("models")
    converted = to_ctranslate2(model, tokenizer, folder / "converted")
    return {"ctranslate2": converted, "torch": save(folder / "torch", model, tokenizer)}


class Running:
    """A service in a process of its own."""

    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process, self.port = process, port

    def ask(self, path: str = "/health", body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        """Return the status and the JSON of an answer."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, body)
            answer = connection.getresponse()
            return answer.status, json.load(answer)

    def translate(self, text: str) -> tuple[int, dict[str, Any]]:
        return self.ask("/translate", json.dumps({"text": text}).encode())

    @contextlib.contextmanager
    def busy(self, answers: list[tuple[int, dict[str, Any]]]) -> Generator[None]:
        """Run a block while a long text is translated, whose answer is then added to `answers`."""
        client = threading.Thread(target=lambda: answers.append(self.translate(LONG)))
        client.start()
        while client.is_alive() and self.ask()[1]["open_requests"] == 0:
            time.sleep(0.01)
        assert client.is_alive()
        yield
        client.join()


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Generator[Running]:
    command = [sys.executable, str(FOLDER / "service.py"), str(folder), "--port=0", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **streams) as process:
        try:
            assert process.stderr is not None
            log = iter(process.stderr.readline, "")
            port = next(found[1] for found in (re.search(r"http://127.0.0.1:(\d+)", line) for line in log) if found)
            yield Running(process, int(port))
        finally:
            process.terminate()


@pytest.fixture(scope="module", params=["ctranslate2", "torch"])
def service(request: pytest.FixtureRequest, models: dict[str, Path]) -> Generator[Running]:
    with running(models[request.param], "--tokens=16", "--characters=1000") as started:
        yield started


@pytest.mark.slow
def test_service_translates_each_sentence_and_reports_its_health(service: Running) -> None:
    answer = {"translation": "hola mundo\nte amo", "cut": [], "unfinished": [], "unknown_words": []}
    assert service.translate("hello world\ni love you\n") == (200, answer)
    empty = answer | {"translation": ""}
    assert service.translate(" \n") == (200, empty)
    body = json.dumps({"text": ["hello world\ni love you", ""]}).encode()
    assert service.ask("/translate", body) == (200, [answer, empty])
    status, health = service.ask()
    assert (status, health["status"], health["open_requests"], health["refused"]) == (200, "ok", 0, 0)
    assert health["answered"] > health["cut"]


@pytest.mark.slow
def test_service_names_the_sentences_that_it_cut(service: Running) -> None:
    long = "good morning " * 9 + "!"
    status, answer = service.translate(f"hello world\n{long}")
    assert (status, answer["cut"]) == (200, [long])
    assert answer["translation"].startswith("hola mundo")
    assert service.ask()[1]["cut"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b'{"text": "hello', 400),
        (b"\xff\xfe", 400),
        (b"[" * 9000, 400),
        (b'["hello world"]', 400),
        (b'{"texts": "hello world"}', 400),
        (b'{"text": "hello world", "\\ud800": 1}', 400),
        (b'{"text": "hello", "text": "hello world"}', 400),
        (b'{"text": null}', 400),
        (b'{"text": ["hello world", 1]}', 400),
        (b'{"text": "\\ud800"}', 400),
        (b'{"text": "\xed\xa0\x80"}', 400),
        (b'{"text": "%s"}' % (b"x" * 1001), 413),
        (b'{"text": ["%s", "xx"]}' % (b"x" * 999), 413),
        (b" " * 100_000, 413),
    ],
)
def test_service_refuses_a_bad_request_in_a_sentence(body: bytes, status: int, service: Running) -> None:
    answered, answer = service.ask("/translate", body)
    assert answered == status
    assert answer["error"].endswith(".")


@pytest.mark.slow
def test_service_takes_a_text_of_escapes_up_to_the_limit(service: Running) -> None:
    body = json.dumps({"text": "\U0001f600 " * 500}).encode()
    assert service.ask("/translate", body)[0] == 200


@pytest.mark.slow
def test_unknown_path_and_method_are_refused(service: Running) -> None:
    assert service.ask("/")[0] == 404
    assert service.ask("/translate")[0] == 405


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ctranslate2", "torch"])
def test_sigterm_lets_a_request_end(engine: str, models: dict[str, Path]) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    with running(models[engine], "--seconds=300") as service:
        with service.busy(answers):
            service.process.terminate()
        assert service.process.wait(timeout=60) == -signal.SIGTERM  # 143 in a shell
        with pytest.raises(ConnectionRefusedError):
            service.ask()
    ((status, answer),) = answers
    assert status == 200
    assert answer["translation"].count("gato") >= 200


@pytest.mark.slow
def test_service_refuses_more_requests_than_may_wait(models: dict[str, Path]) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    with running(models["ctranslate2"], "--waiting=0", "--seconds=300") as service:
        with service.busy(answers):
            status, answer = service.translate("hello world")
            assert (status, answer["error"].partition(";")[0]) == (503, "Too many requests are waiting")
        assert answers[0][0] == 200
        assert service.translate("hello world")[0] == 200
        assert service.ask()[1]["refused"] == 1


@pytest.mark.slow
def test_service_gives_up_a_text_at_its_time_limit(models: dict[str, Path]) -> None:
    with running(models["ctranslate2"], "--seconds=0.1") as service:
        status, answer = service.translate("the cat. " * 1100)
        assert (status, answer["error"].partition(";")[0]) == (503, "No translation within 0.1 seconds")
        health = service.ask()[1]
        assert (health["open_requests"], health["answered"], health["refused"]) == (0, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ctranslate2", "torch"])
def test_client_that_hangs_up_frees_its_place(engine: str, models: dict[str, Path]) -> None:
    body = json.dumps({"text": "the cat is black. " * 5000}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with running(models[engine], "--seconds=300", "--characters=100000") as service:
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
            connection.sendall(head + body)
            while service.ask()[1]["open_requests"] == 0:
                time.sleep(0.01)
        start = time.monotonic()
        assert service.translate("hello world")[0] == 200
        assert time.monotonic() - start < 5
        health = service.ask()[1]
        assert (health["open_requests"], health["answered"], health["refused"]) == (0, 1, 0)


@pytest.mark.slow
def test_service_waits_for_a_body_no_longer_than_its_limit(models: dict[str, Path]) -> None:
    with (
        running(models["ctranslate2"], "--seconds=0.2") as service,
        socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection,
    ):
        connection.sendall(b'POST /translate HTTP/1.1\r\nHost: here\r\nContent-Length: 20\r\n\r\n{"text"')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


class Recorder:
    """A translator that keeps the tokens that it gets."""

    def __init__(self, translator: Any) -> None:
        self.translator, self.batches, self.settings = translator, [], {}

    def translate_batch(self, batch: list[list[str]], **settings: Any) -> Any:
        self.batches += batch
        self.settings = settings
        return self.translator.translate_batch(batch, **settings)


def test_ctranslate2_gets_the_tokens_that_torch_gets(models: dict[str, Path]) -> None:
    """Special tokens in a text are characters, and other Unicode spaces are spaces."""
    texts = ["</s> hello <pad> world", "<s>", *(f"hello{chr(space)}world" for space in SPACES)]
    engine = SERVICE["CTranslate2Engine"](models["ctranslate2"], DEFAULTS)
    engine.translator = Recorder(engine.translator)
    engine.translate(texts)
    _, tokenizer = model_of_pairs()
    ids = source_encoder(tokenizer)(texts)["input_ids"]
    assert engine.translator.batches == [tokenizer.convert_ids_to_tokens(row) for row in ids]


class Slow:
    """An engine that counts words as tokens, and waits before it returns a batch unchanged."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.batches = seconds, []

    def length(self, sentence: str) -> int:
        return len(sentence.split())

    def translate(self, sentences: list[str]) -> list[Any]:
        self.batches.append(sentences)
        time.sleep(self.seconds)
        return [SERVICE["Translated"](sentence, False, []) for sentence in sentences]


def test_batches_are_bounded_in_tokens() -> None:
    sentences = [*["a"] * 40, "b " * 600, *["c " * 100] * 6]
    batches = list(SERVICE["Service"](Slow(), DEFAULTS).batches(sentences))
    assert [len(batch) for batch in batches] == [32, 8, 1, 5, 1]
    assert [sentence for batch in batches for sentence in batch] == sentences


def test_text_is_given_up_after_the_batch_in_which_its_time_ends() -> None:
    engine = Slow()
    with pytest.raises(TimeoutError):
        SERVICE["Service"](engine, DEFAULTS).translate_texts(["c " * 300 + ". "] * 10, lambda: bool(engine.batches))
    assert len(engine.batches) == 1


class Client:
    """A client that sends a text to a service without a server."""

    def __init__(self, engine: Slow, text: str, *options: str) -> None:
        self.engine, self.text = engine, text
        self.service = SERVICE["Service"](engine, SERVICE["parse_arguments"](["model", *options]))
        self.requests = [{"type": "http.request", "body": json.dumps({"text": text}).encode(), "more_body": False}]
        self.hangs_up = asyncio.Event()
        self.answers: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        if self.requests:
            return self.requests.pop()
        await self.hangs_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.answers.append(message)

    async def ask(self, during: Callable[[asyncio.Task], object] | None = None) -> tuple[int, dict[str, str], Any]:
        """Return the status, headers and JSON of the answer; `during` is called in the first batch."""
        scope = {"type": "http", "method": "POST", "path": "/translate", "headers": [], "query_string": b""}
        task = asyncio.create_task(self.service.app()(scope, self.receive, self.send))
        if during is not None:
            while not self.engine.batches:
                await asyncio.sleep(0.001)
            during(task)
        with contextlib.suppress(ZeroDivisionError):
            await task
        start, body = self.answers
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, json.loads(body["body"])


TWO_BATCHES = "c " * 300 + ". c. " * 300


def test_request_that_is_open_when_the_grace_ends_is_refused_and_given_up() -> None:
    client = Client(Slow(seconds=0.3), TWO_BATCHES)
    status, headers, answer = asyncio.run(client.ask(asyncio.Task.cancel))
    assert (status, answer["error"].partition(";")[0]) == (503, "The service stops")
    assert headers["retry-after"] == "1"
    assert len(client.engine.batches) == 1


def test_text_that_takes_too_long_is_not_to_be_sent_again_at_once() -> None:
    client = Client(Slow(seconds=0.3), TWO_BATCHES, "--seconds=0.1")
    status, headers, answer = asyncio.run(client.ask())
    assert (status, answer["error"].partition(";")[0]) == (503, "No translation within 0.1 seconds")
    assert "retry-after" not in headers


def test_text_of_a_client_that_hangs_up_is_given_up_after_its_batch() -> None:
    client = Client(Slow(seconds=0.3), TWO_BATCHES)
    asyncio.run(client.ask(lambda _: client.hangs_up.set()))
    assert len(client.engine.batches) == 1
    assert (client.service.open_requests, client.service.answered, client.service.refused) == (0, 0, 0)


def test_failure_of_an_engine_is_an_answer_in_json() -> None:
    engine = Slow()
    engine.length = lambda sentence: 1 // 0
    status, _, answer = asyncio.run(Client(engine, "hello").ask())
    assert (status, list(answer)) == (500, ["error"])


def test_answer_keeps_the_lines_of_a_text() -> None:
    text = "\n One. Two!\n\n  Three\r\nfour\u2028five. \n"
    answers = SERVICE["Service"](Slow(), DEFAULTS).translate_texts([text, "", "Five."], lambda: False)
    assert [answer["translation"] for answer in answers] == ["\nOne. Two!\n\nThree\nfour\u2028five.", "", "Five."]


@pytest.mark.parametrize("engine", ["CTranslate2Engine", pytest.param("TorchEngine", marks=pytest.mark.slow)])
def test_sentence_whose_translation_reaches_its_limit_is_listed(
    engine: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = SERVICE[engine](models["torch" if engine == "TorchEngine" else "ctranslate2"], DEFAULTS)
    if engine == "TorchEngine":
        started.model.generation_config.max_new_tokens = 3
    else:
        monkeypatch.setitem(SERVICE["CTranslate2Engine"].translate.__globals__, "EXTRA_TOKENS", -7)
    text = "this is a book"  # of nine tokens, and its translation of more than three
    (answer,) = SERVICE["Service"](started, DEFAULTS).translate_texts([text], lambda: False)
    assert answer["unfinished"] == [text]


@pytest.mark.parametrize(
    ("tokens", "is_unfinished"),
    [
        (["a"] * 12 + ["</s>"], True),
        (["b"] + ["a", "b", "c", "d"] * 3 + ["</s>"], True),
        (["a"] * 11 + ["</s>"], False),
        (["a", "b", "c", "d", "e"] * 4 + ["</s>"], False),
        (["a"], True),
        ([], True),
    ],
)
def test_translation_without_an_end_or_with_a_loop_at_it_is_unfinished(tokens: list[str], is_unfinished: bool) -> None:
    assert SERVICE["is_unfinished"](tokens, end="</s>") == is_unfinished


def test_line_break_in_a_translation_adds_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Slow()
    monkeypatch.setattr(engine, "translate", lambda sentences: [SERVICE["Translated"]("a\nb", False, [])])
    (answer,) = SERVICE["Service"](engine, DEFAULTS).translate_texts(["hello"], lambda: False)
    assert answer["translation"] == "a b"


@pytest.mark.parametrize(
    ("body", "problem"), [(b'{"text": "a", "beams": 5}', "'beams': unknown"), (b"[]", "The body is not")]
)
def test_body_with_a_mistake_is_refused_by_name(body: bytes, problem: str) -> None:
    with pytest.raises(SERVICE["HTTPException"], match=f"400: {problem}"):
        SERVICE["text_of"](body, 1000)


@pytest.mark.parametrize("engine", ["CTranslate2Engine", pytest.param("TorchEngine", marks=pytest.mark.slow)])
def test_engine_counts_the_tokens_up_to_its_limit(engine: str, models: dict[str, Path]) -> None:
    folder = models["torch" if engine == "TorchEngine" else "ctranslate2"]
    started = SERVICE[engine](folder, DEFAULTS)
    _, tokenizer = model_of_pairs()
    assert started.length("hello world") == len(tokenizer("hello world")["input_ids"])
    assert started.length("hello world " * 300) == DEFAULTS.tokens


def test_tokens_beyond_the_positions_of_a_converted_model_are_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = to_ctranslate2(*model_of_pairs(), tmp_path / "model", positions=300)
    load_engine, parse_arguments = SERVICE["load_engine"], SERVICE["parse_arguments"]
    with pytest.raises(SystemExit, match="2"):
        load_engine(parse_arguments([str(folder), "--tokens=2000"]))
    assert re.fullmatch("--tokens: .* got 2000, expected at most 250. .*\n", capsys.readouterr().err)
    assert load_engine(parse_arguments([str(folder), "--tokens=250"])).length("hello " * 300) == 250


def test_converted_model_with_more_positions_gets_longer_sentences(tmp_path: Path) -> None:
    folder = to_ctranslate2(*model_of_pairs(), tmp_path / "model", positions=2100)
    engine = SERVICE["CTranslate2Engine"](folder, SERVICE["parse_arguments"]([str(folder), "--tokens=2000"]))
    engine.translator = Recorder(engine.translator)
    engine.translate(["hello world " * 2000])
    assert len(engine.translator.batches[0]) == 2000
    assert engine.translator.settings["max_input_length"] == 0  # else CTranslate2 cuts at 1024, and tells nobody


def test_torch_cuts_a_sentence_at_its_learned_positions(tmp_path: Path) -> None:
    _, tokenizer = model_of_pairs()
    model = tiny_model(vocab_size=len(tokenizer), position_embedding="learned", max_position_embeddings=20)
    folder = save(tmp_path, model, tokenizer)
    engine = SERVICE["TorchEngine"](folder, SERVICE["parse_arguments"]([str(folder), "--tokens=2000"]))
    assert [result.is_cut for result in engine.translate(["hello", "hello " * 300])] == [False, True]


def test_unknown_words_are_named_once() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    sentence = "hello brave world"
    assert SERVICE["unknown_words"](sentence, tokenizer.encode(sentence)) == ["brave", "world"]
    bytes_of_words = model_of_pairs()[1].backend_tokenizer
    sentence = "the cat \u5c71 is n\u00e4ive"
    assert SERVICE["unknown_words"](sentence, bytes_of_words.encode(sentence)) == ["\u5c71", "n\u00e4ive"]


@pytest.mark.slow
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_torch_translates_with_every_family(family: str, tmp_path: Path) -> None:
    model, tokenizer = family_of_pairs(family)
    model.generation_config.max_new_tokens = 4
    engine = SERVICE["TorchEngine"](save(tmp_path, model, tokenizer), DEFAULTS)
    translated = engine.translate([*PAIRS, "<pad></s>"])
    assert len(translated) == 7
    assert not any(result.is_cut for result in translated)


def test_torch_takes_one_request_at_a_time(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["service.py", str(models["torch"]), "--parallel=2"])
    with pytest.raises(SystemExit, match="2"):
        SERVICE["main"]()
    assert re.fullmatch("--parallel: torch .* got 2, expected 1.\n", capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--parallel=0", "--threads=-1", "--waiting=-1", "--seconds=nan", "--tokens=0"])
def test_number_outside_its_limits_is_an_error_of_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        SERVICE["parse_arguments"](["model", option])
    name, _, value = option.partition("=")
    assert re.fullmatch(f"argument {name}: got '{value}', expected .* from .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("files", [{}, {"config.json": '{"model_type": "bert"}'}, {"model.bin": "x"}])
def test_folder_without_a_model_is_an_error_of_one_line(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["service.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        SERVICE["main"]()
    assert re.fullmatch(f"{re.escape(str(tmp_path))}: (contains|does).*\n", capsys.readouterr().err)


# Docker


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.torch"])
def test_docker_file_copies_what_exists_pins_what_it_installs_and_starts_the_service_as_a_user(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    assert all((FOLDER / words.split()[0]).exists() for word, _, words in lines if word == "COPY" and "*" not in words)
    for command in (words for word, _, words in lines if word == "RUN"):
        names = [word for word in shlex.split(command)[2:] if not word.startswith(("-", "https:", "./"))]
        assert all(name.endswith(".txt") or "==" in name for name in names)
    instructions = {word: words for word, _, words in lines}
    assert int(instructions["USER"]) > 0
    assert "PORT=8000" in instructions["ENV"].split()
    python, script, *arguments = json.loads(instructions["ENTRYPOINT"])
    assert (python, script) == ("python", "service.py")
    assert SERVICE["parse_arguments"](arguments).host == "0.0.0.0"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.torch"])
def test_check_of_the_container_asks_at_the_port_of_the_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    check = re.search(r"HEALTHCHECK .*\\\n  CMD (.*)", text)
    assert check is not None
    asked: list[str] = []
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append(url))
    monkeypatch.setenv("PORT", "9000")
    exec(json.loads(check[1])[2])
    assert asked == ["http://127.0.0.1:9000/health"]
    assert SERVICE["parse_arguments"](["model"]).port == 9000


def test_requirements_of_the_lean_image_are_exact_and_have_what_the_service_imports() -> None:
    lines = (FOLDER / "requirements.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert all(re.fullmatch(r"[a-z\d-]+==[\d.]+", line) for line in lines)
    names = [line.partition("==")[0] for line in lines]
    assert {"ctranslate2", "starlette", "tokenizers", "uvicorn"} <= set(names)
    assert "torch" not in names


def test_page_starts_the_service_with_options_that_it_has() -> None:
    starts = [words for words in commands_of(ROOT / "docs" / "cpu.md") if "examples/service/service.py" in words]
    assert starts
    for _, _, *arguments in starts:
        SERVICE["parse_arguments"](arguments)
