// The browser's half of live.py: what a screen reader says at a view's parts, and where its picture is clicked.

// ipywidgets draws words beside its sliders, but ties them to nothing, and gives an image no alternative text.
function name(view) {
  for (const label of view.querySelectorAll("label")) {
    const words = label.textContent.trim();
    for (const handle of label.parentElement.querySelectorAll("[role=slider]")) handle.ariaLabel = words;
    for (const number of label.parentElement.querySelectorAll(".widget-readout")) {
      number.ariaLabel = `${words}, as a number`;
    }
  }
  for (const icon of view.querySelectorAll(".widget-play button i")) {
    icon.parentElement.ariaLabel = icon.className.match(/fa-(\w+)/)?.[1]; // play, pause, stop, repeat
  }
  for (const image of view.querySelectorAll("img")) image.alt = image.title;
}

// As fractions of the picture, from its left and upper edge. It may be shrunk to fit, with margins on two sides.
function place(image, event) {
  const box = image.getBoundingClientRect();
  const scale = Math.min(box.width / image.naturalWidth, box.height / image.naturalHeight);
  const x = (event.clientX - box.x - box.width / 2) / (scale * image.naturalWidth);
  const y = (event.clientY - box.y - box.height / 2) / (scale * image.naturalHeight);
  return [0.5 + x, 0.5 + y];
}

export default {
  render({ model, el }) {
    let frame, view;
    const observer = new MutationObserver(() => name(view));
    const click = (event) => {
      if (event.target.matches("img.fa2lab-clickable")) model.send(place(event.target, event));
    };
    const begin = () => {
      view = el.closest(".fa2lab-view");
      if (!view) return void (frame = requestAnimationFrame(begin)); // not on the page yet
      name(view);
      observer.observe(view, { subtree: true, childList: true, attributeFilter: ["class", "title"] });
      view.addEventListener("click", click);
    };
    begin();
    return () => {
      cancelAnimationFrame(frame);
      observer.disconnect();
      view?.removeEventListener("click", click);
    };
  },
};
