"""An HTTP service that translates with the model in a folder: `python service.py FOLDER`.

A folder that `vaswani-convert ctranslate2` wrote runs in CTranslate2, without torch; any other model runs in torch.

    POST /translate  {"text": "..."}  ->  {"translation": "...", "cut": [], "unfinished": [], "unknown_words": []}
    POST /translate  {"text": ["...", "..."]}  ->  [{"translation": "...", ...}, {"translation": "...", ...}]
    GET /health  ->  {"status": "ok", "model": "FOLDER", "open_requests": 0, "answered": 7, "cut": 0, "refused": 0}

A translation keeps the lines of its text. `cut` lists the sentences of which only the first tokens were translated,
`unfinished` those whose translation reached the length limit or ends in a loop, and `unknown_words` the words with
characters that the vocabulary lacks. `/health` counts the answers, those that list a cut sentence, and requests refused
with 503. Work for a client that hangs up ends with its batch.

Size, time and memory of a request are limited. A refused request gets {"error": "..."}, with status 400 (malformed),
408 (sent too slowly), 413 (too long) or 503 (too many requests, out of time, or stopping).
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")  # a line break ends one too
SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")  # count as spaces, as in training
BATCH_TOKENS = 512  # of the sources translated at once, padding included; work can end between batches
MIN_TOKENS = 16  # that a sentence counts as, so that a batch has at most 32
BEAMS = 4
EXTRA_TOKENS = 50  # of a translation beyond its source, as in the paper
BYTES = 12  # of a character in JSON at most: two \uXXXX
OTHER_BYTES = 1024  # of the JSON around the text
AGAIN = {"Retry-After": "1"}  # seconds
WORD_START = "\u2581"  # the mark before a word, whose place is that of the character before it
EXPECTED = 'expected {"text": "..."}, or a list of texts'


@dataclass(frozen=True)
class Translated:
    """A sentence's translation, whether the sentence was cut, its unknown words, and whether the end is missing."""

    text: str
    is_cut: bool
    unknown_words: list[str]
    is_unfinished: bool = False


Answer = dict[str, str | list[str]]


class Engine(Protocol):
    """What translates a batch of sentences."""

    def length(self, sentence: str) -> int: ...

    def translate(self, sentences: list[str]) -> list[Translated]: ...


class CTranslate2Engine:
    """A converted model; its threads share the weights."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        import ctranslate2
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True  # `</s>` in a text is four characters
        self.tokenizer.enable_truncation(options.tokens)
        parallel, threads = options.parallel, options.threads
        self.translator = ctranslate2.Translator(str(folder), inter_threads=parallel, intra_threads=threads)
        self.check_positions(options.tokens)

    def check_positions(self, tokens: int) -> None:
        """Stop the program if the model has too few positions for a sentence's translation."""
        longest = [self.tokenizer.id_to_token(0)] * (tokens + EXTRA_TOKENS)
        try:
            self.translator.translate_batch([longest], max_input_length=0, max_decoding_length=1)
        except RuntimeError as error:  # CTranslate2 tells the number of positions only here
            positions = re.search(r"positions >= (\d+)", str(error))
            if positions is None:
                raise
            count = int(positions[1])
            problem = f"too many for {count} positions, {EXTRA_TOKENS} of which are for a longer translation"
            numbers = f"got {tokens}, expected at most {count - EXTRA_TOKENS}"
            stop(f"--tokens: {problem}; {numbers}. Lower it, or convert the model with more --positions.")

    def encode(self, sentence: str) -> Any:
        return self.tokenizer.encode(SPACES.sub(" ", sentence))

    def length(self, sentence: str) -> int:
        return len(self.encode(sentence))

    def translate(self, sentences: list[str]) -> list[Translated]:
        encodings = [self.encode(sentence) for sentence in sentences]
        results = self.translator.translate_batch(
            [encoding.tokens for encoding in encodings],
            beam_size=BEAMS,
            patience=2,
            max_input_length=0,  # else CTranslate2 drops tokens after 1,024, which `cut` would not list
            max_decoding_length=max(len(encoding) for encoding in encodings) + EXTRA_TOKENS,
            return_end_token=True,
        )
        translated = []
        for sentence, encoding, result in zip(sentences, encodings, results, strict=True):
            tokens = result.hypotheses[0]
            ids = [index for index in map(self.tokenizer.token_to_id, tokens) if index is not None]
            is_cut = bool(encoding.overflowing)
            words = unknown_words(sentence, encoding)
            unfinished = is_unfinished(tokens, end=encoding.tokens[-1])
            translated.append(Translated(self.tokenizer.decode(ids), is_cut, words, unfinished))
        return translated


def unknown_words(sentence: str, encoding: Any) -> list[str]:
    """Return the words with an unknown token, or with a character that the vocabulary spells by its bytes."""
    pieces = [(token, end) for token, (_, end) in zip(encoding.tokens, encoding.offsets, strict=True)]
    counts = Counter(end for token, end in pieces if token != WORD_START)
    words = {}
    for position, (token, end) in enumerate(pieces):
        if token == "<unk>" or 1 < counts[end] == len(sentence[end - 1 : end].encode()):
            words[encoding.token_to_word(position)] = True
    return [sentence[slice(*encoding.word_to_chars(word))].strip() for word in words]


def is_unfinished(tokens: list[str], end: str) -> bool:
    """Return whether a translation has no end, or ends in a loop: twelve tokens that repeat at most four."""
    tail = tokens[-13:-1]
    return tokens[-1:] != [end] or (len(tail) == 12 and any(tail[n:] == tail[:-n] for n in (3, 4)))


class TorchEngine:
    """A model of any family, prepared in int8."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # else it grows with each new shape of a batch
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        from vaswani_transformer import prepare_for_inference

        torch.set_num_threads(options.threads)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model = prepare_for_inference(AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float32"), "int8")
        self.tokens = options.tokens

    def length(self, sentence: str) -> int:
        return min(len(self.tokenizer(sentence, verbose=False)["input_ids"]), self.tokens)

    def translate(self, sentences: list[str]) -> list[Translated]:
        from vaswani_transformer import translate

        results = translate(
            self.model, self.tokenizer, sentences, batch_tokens=BATCH_TOKENS, max_source_tokens=self.tokens
        )
        return [
            Translated(result.text, result.is_truncated, result.unknown_words, result.is_unfinished)
            for result in results
        ]


class Service:
    """Translates the texts of requests, `parallel` of them at once, while the others wait."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self.turns = asyncio.Semaphore(options.parallel)
        self.open_requests = self.answered = self.cut = self.refused = 0

    def app(self) -> Starlette:
        routes = [Route("/translate", self.translate, methods=["POST"]), Route("/health", self.health)]
        return Starlette(routes=routes, exception_handlers={HTTPException: refusal, Exception: failure})

    async def health(self, request: Request) -> Response:
        counts = {"answered": self.answered, "cut": self.cut, "refused": self.refused}
        name = self.options.folder.name
        return JSONResponse({"status": "ok", "model": name, "open_requests": self.open_requests, **counts})

    def refuse(self, problem: str, headers: dict[str, str] | None = None) -> NoReturn:
        """Count a request that the service cannot answer now, and answer it with 503."""
        self.refused += 1
        raise HTTPException(503, problem, headers)

    async def translate(self, request: Request) -> Response:
        try:
            return await self.answer(request)
        except asyncio.CancelledError:  # by uvicorn, when the requests open at SIGTERM take too long
            self.refuse("The service stops; send it again later.", AGAIN)

    async def answer(self, request: Request) -> Response:
        limit = BYTES * self.options.characters + OTHER_BYTES
        body = await read_body(request, limit, self.options.seconds)
        text = text_of(body, self.options.characters)
        texts = [text] if isinstance(text, str) else text
        if self.open_requests >= self.options.parallel + self.options.waiting:
            self.refuse("Too many requests are waiting; send it again later.", AGAIN)
        self.open_requests += 1
        hang_up = asyncio.ensure_future(request.receive())
        try:
            answers = await self.in_turn(texts, hang_up)
        except TimeoutError:
            if hang_up.done():
                raise HTTPException(400, "The client hung up.") from None
            problem = f"No translation within {self.options.seconds:g} seconds"
            self.refuse(f"{problem}; send a shorter text, or send it later.")  # not `AGAIN`: it would take as long
        finally:
            hang_up.cancel()  # which also ends the work of a canceled request
            self.open_requests -= 1

        self.answered += 1
        self.cut += any(answer["cut"] for answer in answers)
        return JSONResponse(answers[0] if isinstance(text, str) else answers)

    async def in_turn(self, texts: list[str], hang_up: asyncio.Future) -> list[Answer]:
        """Return the answer to each text; raise TimeoutError if its time ends or its client hangs up."""
        end = time.monotonic() + self.options.seconds
        async with asyncio.timeout(self.options.seconds):
            await self.turns.acquire()
        try:
            return await asyncio.to_thread(
                self.translate_texts, texts, lambda: hang_up.done() or time.monotonic() > end
            )
        finally:
            self.turns.release()

    def batches(self, sentences: list[str]) -> Iterator[list[str]]:
        """Yield the sentences in batches of at most `BATCH_TOKENS`; a longer sentence is a separate batch."""
        batch: list[str] = []
        longest = MIN_TOKENS
        for sentence in sentences:
            length = self.engine.length(sentence)
            if batch and (len(batch) + 1) * max(longest, length) > BATCH_TOKENS:
                yield batch
                batch, longest = [], MIN_TOKENS
            batch.append(sentence)
            longest = max(longest, length)
        if batch:
            yield batch

    def translate_texts(self, texts: list[str], is_over: Callable[[], bool]) -> list[Answer]:
        """Return the answer to each text; raise TimeoutError before the first batch for which `is_over()`."""
        every = [split_sentences(text) for text in texts]
        sentences = [sentence for lines in every for line in lines for sentence in line]

        translated: list[Translated] = []
        for batch in self.batches(sentences):
            if is_over():
                raise TimeoutError
            translated += self.engine.translate(batch)

        pairs = zip(sentences, translated, strict=True)
        return [answer_to(lines, list(itertools.islice(pairs, sum(map(len, lines))))) for lines in every]


def split_sentences(text: str) -> list[list[str]]:
    """Return the sentences of each line of a text; a line ends with a line feed alone, or after a carriage return."""
    return [[part for part in SENTENCE_END.split(line.strip()) if part] for line in re.split(r"\r?\n", text.rstrip())]


def answer_to(lines: list[list[str]], pairs: list[tuple[str, Translated]]) -> Answer:
    """Return the answer to a text of `lines` of sentences, from all its sentences with their translations."""
    texts = (re.sub(r"[\r\n]", " ", result.text) for _, result in pairs)
    return {
        "translation": "\n".join(" ".join(itertools.islice(texts, len(line))) for line in lines),
        "cut": [sentence for sentence, result in pairs if result.is_cut],
        "unfinished": [sentence for sentence, result in pairs if result.is_unfinished],
        "unknown_words": [word for _, result in pairs for word in result.unknown_words],
    }


async def refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def failure(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "The service failed; its log contains the reason."}, 500)


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """Return the body of a request; refuse one that is too long or arrives too slowly."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise HTTPException(413, f"The body has more than {limit:,} bytes; send a shorter text.")
    except TimeoutError:
        raise HTTPException(408, f"The body did not arrive within {seconds:g} seconds.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The body is incomplete.") from None
    return bytes(body)


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; refuse a name that occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise HTTPException(400, f"A field occurs twice; {EXPECTED}.")
    return fields


def text_of(body: bytes, characters: int) -> str | list[str]:
    """Return the text, or the texts, in the body of a request; refuse anything else."""
    try:
        fields = json.loads(body, object_pairs_hook=unique_fields)
    except (ValueError, RecursionError):
        raise HTTPException(400, f"The body is not JSON; {EXPECTED}.") from None
    if not isinstance(fields, dict):
        raise HTTPException(400, f"The body is not a JSON object; {EXPECTED}.")
    for name in fields:
        if name != "text":
            raise HTTPException(400, f"{name[:40]!a}: unknown field; {EXPECTED}.")
    text = fields.get("text")
    texts = text if isinstance(text, list) else [text]
    if not all(isinstance(each, str) for each in texts):
        raise HTTPException(400, f"text: missing, or not a string; {EXPECTED}.")
    if any(re.search("[\ud800-\udfff]", each) for each in texts):
        raise HTTPException(400, "text: half of a surrogate pair; send valid Unicode.")
    if (count := sum(map(len, texts))) > characters:
        problem = f"text: too long; got {count:,} characters, expected at most {characters:,}."
        raise HTTPException(413, f"{problem} Send it in parts.")
    return text


def stop(problem: str) -> NoReturn:
    """End the program with an error of one line."""
    print(problem, file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        stop(f"{message}. --help lists the options.")


def number(kind: type[int] | type[float], least: float, most: float) -> Callable[[str], float]:
    """Return a function that parses a number within limits."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {kind.__name__} from {least:,} to {most:,}")

    return parse


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    positive, cores = number(int, 1, 1_000_000), number(int, 1, 1_000)
    seconds, port = number(float, 0.01, 86_400), number(int, 0, 65_535)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the model's folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: only this machine)")
    port_help = "port to listen at (the variable PORT, else 8000)"
    parser.add_argument("--port", type=port, default=os.environ.get("PORT", "8000"), help=port_help)
    parser.add_argument("--parallel", type=cores, default=1, help="requests translated at once, in CTranslate2 (1)")
    parser.add_argument("--threads", type=cores, default=1, help="threads for each of them (1)")
    parser.add_argument("--waiting", type=number(int, 0, 1_000_000), default=32, help="requests that may wait (32)")
    parser.add_argument("--seconds", type=seconds, default=30.0, help="time limit of a request (30)")
    parser.add_argument("--characters", type=positive, default=10_000, help="most characters of a text (10000)")
    tokens_help = "tokens after which a sentence is cut (256); in CTranslate2 at most the model's positions less 50"
    parser.add_argument("--tokens", type=positive, default=256, help=tokens_help)
    return parser.parse_args(arguments)


def load_engine(options: argparse.Namespace) -> Engine:
    """Return the engine of the model; a folder that does not load is an error of one line."""
    folder: Path = options.folder
    is_converted = (folder / "model.bin").exists()
    if not (is_converted or (folder / "config.json").exists()):
        stop(f"{folder}: contains no model; got neither model.bin nor config.json. Pass the folder of a model.")
    if options.parallel > 1 and not is_converted:
        stop(f"--parallel: torch translates one request at a time; got {options.parallel}, expected 1.")
    try:
        return CTranslate2Engine(folder, options) if is_converted else TorchEngine(folder, options)
    except Exception as error:  # the libraries raise many kinds
        first_line = str(error).partition("\n")[0]
        stop(f"{folder}: does not load; {type(error).__name__}: {first_line}")


def main() -> None:
    options = parse_arguments()
    engine = load_engine(options)
    grace = int(options.seconds) + 5  # after SIGTERM, for open requests
    uvicorn.run(Service(engine, options).app(), host=options.host, port=options.port, timeout_graceful_shutdown=grace)


if __name__ == "__main__":
    main()
