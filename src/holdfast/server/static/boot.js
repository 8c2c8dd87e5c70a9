// Shows why the page does not start: one file with an error stops all modules.
addEventListener("error", ({ message, filename, lineno }) => {
  const app = document.querySelector("holdfast-app");
  if (message && !app?.client) app.textContent = `${message} (${filename}:${lineno}). If that file is yours, \`holdfast ui diff\` shows your changes.`;
});
