// Says why the page does not start: one file that cannot be read stops all of them.
addEventListener("error", ({ message, filename, lineno }) => {
  const app = document.querySelector("assent-app");
  if (message && !app?.client) app.textContent = `${message} (${filename}:${lineno}). If that file is yours, \`assent ui diff\` shows what you changed.`;
});
