"""code-server in a browser: its settings for tests, and what people do in its page."""

from playwright.sync_api import expect

SETTINGS = {
    # The terminal's text is in the page then and not only in a picture.
    "terminal.integrated.gpuAcceleration": "off",
    "terminal.integrated.defaultProfile.linux": "bash",
    "workbench.startupEditor": "none",
    "files.autoSave": "off",
}


def open_file(page, name, text):
    """Opens a file at the top of the folder, which has to show that text; what is typed afterwards goes there."""
    page.locator(".explorer-folders-view .monaco-list-row", has_text=name).dblclick()
    editor = page.locator(".editor-group-container .monaco-editor .view-lines")
    expect(editor).to_contain_text(text)
    editor.click()


def append_and_save(page, text):
    page.keyboard.press("Control+End")
    page.keyboard.type(text)
    page.keyboard.press("Control+s")


def type_into_terminal(page, prompt, command, answer):
    """Opens a terminal whose prompt has that text in it (what is typed before is lost), and runs a command that answers so."""
    page.keyboard.press("Control+Shift+Backquote")
    terminal = page.locator(".terminal-wrapper .xterm-rows")
    expect(terminal).to_contain_text(prompt)
    page.keyboard.type(f"{command}\n")
    expect(terminal).to_contain_text(answer)
