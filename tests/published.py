"""The files of code that a published repository of each model family has, written out."""

EVERY_FAMILY = {
    "attention.py",
    "body.py",
    "config.py",
    "decoder.py",
    "dropout.py",
    "embeddings.py",
    "encoder.py",
    "generation_settings.py",
    "layers.py",
    "loss.py",
    "pipeline.py",
    "pretrained.py",
    "restricted.py",
    "search.py",
    "tokenizer.py",
}
EVERY_NAR_FAMILY = EVERY_FAMILY | {"lengths.py", "nar_decoder.py", "nar_generation.py", "nar_head.py"}
PUBLISHED_FILES = {
    "transformer": EVERY_FAMILY | {"generation.py", "model.py"},
    "nat": EVERY_NAR_FAMILY | {"nat.py", "nat_decoder.py"},
    "iterative_vae": EVERY_NAR_FAMILY | {"iterative_vae.py", "latent.py", "nat.py", "nat_decoder.py"},
    "flowseq": EVERY_NAR_FAMILY | {"flow.py", "flowseq.py", "nat.py", "nat_decoder.py"},
    "cmlm": EVERY_NAR_FAMILY | {"cmlm.py", "cmlm_masks.py"},
}
