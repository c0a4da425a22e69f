// What a screen reader says at a slider's handle, at its number, at the buttons that play and at the picture.
// ipywidgets draws words beside its sliders, but ties them to nothing, and gives an image no alternative text.

function name(view) {
  for (const label of view.querySelectorAll("label")) {
    const words = label.textContent.trim();
    for (const handle of label.parentElement.querySelectorAll("[role=slider]")) handle.ariaLabel = words;
    for (const number of label.parentElement.querySelectorAll(".widget-readout")) number.ariaLabel = `${words}, as a number`;
  }
  for (const icon of view.querySelectorAll(".widget-play button i")) {
    icon.parentElement.ariaLabel = icon.className.match(/fa-(\w+)/)[1]; // play, pause, stop, repeat
  }
  for (const image of view.querySelectorAll("img")) image.alt = image.title;
}

export default {
  render({ el }) {
    let frame, view;
    const observer = new MutationObserver(() => name(view));
    const begin = () => {
      view = el.closest(".fa2lab-view");
      if (!view) return void (frame = requestAnimationFrame(begin)); // not on the page yet
      name(view);
      observer.observe(view, { subtree: true, childList: true, attributeFilter: ["class", "title"] });
    };
    begin();
    return () => {
      cancelAnimationFrame(frame);
      observer.disconnect();
    };
  },
};
