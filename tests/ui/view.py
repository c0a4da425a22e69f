"""A fa2lab view on a page of JupyterLab: its controls, its words and its picture, as a reader meets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import FloatRect, Locator, TimeoutError

from fa2lab.live import STALE

if TYPE_CHECKING:
    from harness import Notebook


class View:
    """A fa2lab view on the page: controls, words, and the picture."""

    def __init__(self, notebook: Notebook, number: int):
        self.notebook, self.page, self.number = notebook, notebook.page, number
        self.cell = notebook.cell(number)
        self.whole = self.cell.locator(".widget-vbox").first
        self.image = self.cell.locator("img.widget-image")
        self.image.first.wait_for(timeout=10_000)

    def press(self, name: str, *, by_keyboard: bool = False) -> None:
        """Press the button with just these words on it."""
        button = self.whole.get_by_role("button", name=name, exact=True)
        if by_keyboard:
            button.focus()
            self.page.keyboard.press("Enter")
        else:
            button.click()

    def show(self) -> None:
        """Scroll to the view: what is far from the window is not laid out, and has no words to read."""
        self.notebook.cell(self.number)

    @property
    def box(self) -> FloatRect:
        """Where the view's controls and picture stand in the window: what a picture of it should hold."""
        return self.whole.evaluate(
            """view => {
                const {x, y, bottom} = view.getBoundingClientRect()
                const shown = [...view.querySelectorAll('img, .widget-inline-hbox:not(.widget-html)')]
                const right = Math.max(...shown.map(element => element.getBoundingClientRect().right))
                return {x, y, width: right - x, height: bottom - y}
            }"""
        )

    @property
    def text(self) -> str:
        """The picture's alternative text."""
        return self.image.get_attribute("title") or ""

    def control(self, label: str) -> Locator:
        """A control by the words before it."""
        return self.whole.locator("label.widget-label", has_text=label).locator("xpath=..")

    def slider(self, label: str) -> Locator:
        """The handle of a slider by its name: what the pointer drags, the keyboard reaches and a screen reader says."""
        return self.whole.get_by_role("slider", name=label, exact=True)

    def number_at(self, label: str) -> int:
        """The number that stands beside a slider."""
        return int(self.control(label).locator(".widget-readout").inner_text())

    def choose(self, label: str, option: str) -> None:
        """Take an option of a drop-down list."""
        self.control(label).locator("select").select_option(label=option)

    def focusable_before(self, label: str) -> int:
        """How many of the view's controls the keyboard can reach before and at this slider."""
        return self.whole.evaluate(
            """(view, [stops, slider]) =>
                1 + [...view.querySelectorAll(stops)].filter(stop => stop.checkVisibility()).indexOf(slider)""",
            ["[tabindex], [contenteditable=true], select, input, button:enabled", self.slider(label).element_handle()],
        )

    def tab_to(self, label: str) -> int:
        """From the cell's code by the Tab key to a slider; returns how many stops of the view that took."""
        self.page.evaluate(
            """n => {
                document.activeElement.blur()
                window.jupyterapp.shell.currentWidget.content.activeCellIndex = n
            }""",
            self.number,
        )
        self.notebook.command("notebook:enter-command-mode")  # the cell has the focus, as after Escape
        slider, stops = self.slider(label).element_handle(), 0
        for _ in range(40):
            self.page.keyboard.press("Tab")
            stops += self.whole.evaluate("view => view.contains(document.activeElement)")
            if slider.evaluate("slider => slider === document.activeElement"):
                return stops
        raise AssertionError(f"40 strokes of the Tab key have not reached {label!r}")

    def drag(self, label: str, pixels: int, *, steps: int = 8) -> None:
        """Take a slider's handle, move the pointer to the right, let go."""
        self.slider(label).scroll_into_view_if_needed()
        box = self.slider(label).bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(x + pixels, y, steps=steps)
        self.page.mouse.up()

    def click(self, x: float, y: float) -> None:
        """Click on the picture, by fractions of it from the left and from above."""
        self.image.scroll_into_view_if_needed()
        box = self.image.bounding_box()
        self.page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])

    def move(self, key: str) -> None:
        """Press a key that moves what has the focus, and wait for the new picture."""
        image = self.image.element_handle()
        before = image.evaluate("image => image.src")
        self.page.keyboard.press(key)
        self.page.wait_for_function(
            "([image, before, stale]) => image.src !== before && !image.classList.contains(stale)",
            arg=[image, before, STALE],
        )

    def wait_for_text(self, part: str) -> str:
        """Wait until the picture is that of the shown values and its text holds this part; returns the text."""
        try:
            self.page.wait_for_function(
                "([image, part, stale]) => image.title.includes(part) && !image.classList.contains(stale)",
                arg=[self.image.element_handle(), part, STALE],
            )
        except TimeoutError as late:
            raise AssertionError(f"waited for {part!r}; the picture says {self.text!r}") from late
        return self.text

    def wait_for_words(self, part: str) -> None:
        """Wait until the line above the picture says this."""
        self.whole.locator(".widget-html-content", has_text=part).wait_for()

    @property
    def is_stale(self) -> bool:
        """Does the picture look like one of older values?"""
        return float(self.image.evaluate("image => getComputedStyle(image).opacity")) < 1

    def height(self) -> float:
        """How far below the view's top the next cell begins."""
        return self.page.evaluate(
            """([view, n]) => {
                const next = document.querySelector(`.jp-Notebook .jp-Cell[data-windowed-list-index="${n + 1}"]`)
                return next.getBoundingClientRect().top - view.getBoundingClientRect().top
            }""",
            [self.whole.element_handle(), self.number],
        )

    def picture(self) -> str:
        """The picture's pixels, as a data address; raises for none, or one that lets the page shine through."""
        return self.image.evaluate(
            """async image => {
                await image.decode()
                const canvas = document.createElement('canvas')
                canvas.width = image.naturalWidth
                canvas.height = image.naturalHeight
                const context = canvas.getContext('2d')
                context.drawImage(image, 0, 0)
                const bytes = context.getImageData(0, 0, canvas.width, canvas.height).data
                for (let i = 3; i < bytes.length; i += 4) if (bytes[i] < 255) throw new Error('transparent picture')
                return canvas.toDataURL()
            }"""
        )

    def contrasts(self) -> dict[str, float]:
        """Contrast (WCAG 2, 1 to 21) of every piece of text in the view with what lies behind it, by the text."""
        return self.whole.evaluate(CONTRASTS)

    def unreadable(self) -> dict[str, float]:
        """The texts with less contrast than WCAG 2 asks, but for disabled buttons', of which it asks none."""
        self.show()
        off = {button.inner_text() for button in self.whole.locator("button:disabled").all()}
        return {
            text: contrast for text, contrast in self.contrasts().items() if contrast < READABLE and text not in off
        }

    def background(self) -> list[float]:
        """Red, green and blue of what lies behind the view."""
        return self.whole.evaluate(f"view => {BEHIND}(view)")

    def unlabelled(self) -> list[str]:
        """What has no name that a screen reader can say, and sliders without a hint; empty where all is well."""
        self.show()
        looked_at, without = self.whole.evaluate(UNLABELLED)
        assert looked_at, "there is no control on the page"
        return without


READABLE = 4.5  # the contrast that WCAG 2 asks of text

UNLABELLED = """view => {
    const named = {
        '[role=slider]': c => c.closest(':has(> label)').querySelector('label').title?.length > 4 && c.ariaLabel,
        '.widget-readout, img': c => c.ariaLabel || c.alt,
        'select, input': c => [...c.labels].map(label => label.innerText).join(''),
        'button': c => c.ariaLabel || c.innerText,
    }
    const all = Object.entries(named).flatMap(([which, name]) => [...view.querySelectorAll(which)]
        .filter(c => c.checkVisibility()).map(c => [c, name(c) || '']))
    return [all.length, all.filter(([, says]) => !/[a-z]{3}|[0-9]/i.test(says)).map(([c]) => c.outerHTML)]
}"""

BEHIND = """(element => {
    for (; element; element = element.parentElement) {
        const [r, g, b, a = 1] = getComputedStyle(element).backgroundColor.match(/[0-9.]+/g).map(Number)
        if (a === 1) return [r, g, b]
    }
    return [255, 255, 255]
})"""

# For each text: its colour's luminance against that of the first opaque background around it.
CONTRASTS = """view => {
    const luminance = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        return 0.2126 * x + 0.7152 * y + 0.0722 * z
    }
    const numbers = colour => colour.match(/[0-9.]+/g).map(Number)
    const behind = BEHIND
    const found = {}
    const walker = document.createTreeWalker(view, NodeFilter.SHOW_TEXT)
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const element = node.parentElement, text = node.textContent.trim()
        if (!text || element.closest('style') || !element.checkVisibility()) continue
        const both = [numbers(getComputedStyle(element).color), behind(element)]
        const [low, high] = both.map(luminance).sort((a, b) => a - b)
        found[text] = Math.min(found[text] ?? 21, (high + 0.05) / (low + 0.05))
    }
    return found
}""".replace("BEHIND", BEHIND)
