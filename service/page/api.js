// Requests to the service. Keys are kept only in this module's memory.

const keys = { page: null, admin: null }; // admin requests fall back to the page's key
let openDialog = null; // promise of the key dialog while it is open

/** Return whether the user has entered a key. */
export const hasKey = () => keys.page !== null;

/** An error response: its `status` (0 if the service is unreachable) and the service's `message`. */
export class ServiceError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Send a request; `path` is relative to the page's address, so that the page also works below a prefix. */
export async function request(path, { method = "GET", json, body, type, query, signal } = {}) {
  const url = new URL(path.replace(/^\//, ""), document.baseURI.replace(/#.*/, ""));
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== null && value !== undefined) url.searchParams.append(name, asText(value));
  }
  const keyName = path.startsWith("admin/") ? "admin" : "page";
  const currentKey = () => keys[keyName] ?? keys.page;
  for (;;) {
    const sent = currentKey();
    const headers = { "Dubito-Purpose": "test" }; // keeps the page's requests out of drift monitoring
    if (json !== undefined) headers["Content-Type"] = "application/json";
    else if (type) headers["Content-Type"] = type;
    if (sent) headers.Authorization = `Bearer ${sent}`;
    let answer;
    try {
      const content = json === undefined ? body : JSON.stringify(json);
      answer = await fetch(url, { method, headers, body: content, signal, credentials: "omit", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServiceError(0, "Cannot reach the service.");
    }
    if (answer.status === 401 || (answer.status === 403 && keyName === "admin" && sent !== null)) {
      // If the key has changed since, another request has already opened the dialog.
      if (currentKey() === sent && !(await promptForKey(keyName, sent !== null))) throw new ServiceError(answer.status, "This needs an admin key, but none was entered.");
      continue;
    }
    if (answer.ok) return answer;
    throw new ServiceError(answer.status, await errorDetail(answer), Number(answer.headers.get("Retry-After")) || null);
  }
}

/** Send a request and parse the JSON response. */
export async function requestJson(path, options) {
  return (await request(path, options)).json();
}

/** Encode a value for a query or form: objects become JSON. */
export const asText = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

async function errorDetail(answer) {
  try {
    const problem = await answer.json();
    return problem.detail ?? problem.title ?? answer.statusText;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

/** Let the user enter another key, if the scopes of the current one do not suffice. */
export const changeKey = () => promptForKey("page", true, true);

/** Open the key dialog; resolve to whether a key was entered. */
function promptForKey(keyName, wasRejected, canCancel = keyName === "admin") {
  openDialog ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const field = document.getElementById("key-given");
    const isAdmin = keyName === "admin";
    document.getElementById("key-title").textContent = isAdmin ? "This requires an admin key" : "This service requires a key";
    document.getElementById("key-why").textContent = isAdmin
      ? `${wasRejected ? "The last key is not allowed to do this. " : ""}Fitting, promoting, rolling back and resetting need the scope admin.`
      : wasRejected
        ? "The last key is not valid, has expired, or lacks a scope."
        : "Ask the operator for a key. This page uses the scopes read, predict, acquire, label and rows.";
    document.getElementById("key-not").hidden = !canCancel;
    field.value = "";
    dialog.returnValue = "";
    dialog.oncancel = (event) => canCancel || event.preventDefault();
    dialog.addEventListener(
      "close",
      () => {
        const isEntered = dialog.returnValue === "ok";
        if (isEntered) keys[keyName] = field.value.trim();
        field.value = "";
        openDialog = null;
        resolve(isEntered);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return openDialog;
}
