// Before the first paint: the colours that the reader has chosen, if any. No module, so that it does not wait.
(() => {
  const THEMES = ["system", "light", "dark"];
  const read = () => {
    try {
      return THEMES.includes(localStorage.theme) ? localStorage.theme : "system";
    } catch {
      return "system"; // storage is forbidden: the choice lasts as long as the page
    }
  };
  let theme = read();
  const show = () => (document.documentElement.dataset.theme = theme);
  window.nextTheme = () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.theme = theme;
    } catch {
      // as above
    }
    show();
    return theme;
  };
  show();
})();
