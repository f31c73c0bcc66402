/** The button on a picture of the demo loads its page in place of the picture, as high as its content. */
document.addEventListener("click", ({ target }) => {
  if (!target.matches?.(".demo button")) return;
  const frame = document.createElement("iframe");
  frame.title = "The demo";
  frame.src = target.dataset.page;
  frame.addEventListener("load", () => {
    const { body } = frame.contentDocument;
    const fit = () => { frame.style.height = `${body.scrollHeight}px`; };
    new ResizeObserver(fit).observe(body);
  });
  target.parentElement.replaceChildren(frame);
});
