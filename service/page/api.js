// The service, asked as any client may ask it. A key is kept in this module's memory, and nowhere else.

const keys = { page: null, admin: null }; // of all but administration, and of that where it needs another
let asking = null; // the dialog that asks for a key, while it is open

/** An answer of another status than asked for: `status`, and `message` as the service says it. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** Ask the service; `path` is relative to where the page lies, so that it also works below a prefix. */
export async function ask(path, { method = "GET", json, body, type, query, signal } = {}) {
  const url = new URL(path.replace(/^\//, ""), document.baseURI.replace(/#.*/, ""));
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== null && value !== undefined) url.searchParams.append(name, asText(value));
  }
  const door = path.startsWith("admin/") ? "admin" : "page";
  const known = () => keys[door] ?? keys.page;
  for (;;) {
    const sent = known();
    const headers = { "Dubito-Purpose": "test" }; // what people try here is no traffic
    if (json !== undefined) headers["Content-Type"] = "application/json";
    else if (type) headers["Content-Type"] = type;
    if (sent) headers.Authorization = `Bearer ${sent}`;
    let answer;
    try {
      const content = json === undefined ? body : JSON.stringify(json);
      answer = await fetch(url, { method, headers, body: content, signal, credentials: "omit", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0, "The service cannot be reached.");
    }
    if (answer.status === 401 || (answer.status === 403 && door === "admin" && sent !== null)) {
      // else it was given meanwhile
      if (known() === sent && !(await askForKey(door, sent !== null))) throw new Refused(answer.status, "This needs an administrator's key, and none was given.");
      continue;
    }
    if (answer.ok) return answer;
    throw new Refused(answer.status, await reason(answer), Number(answer.headers.get("Retry-After")) || null);
  }
}

/** The same, and read the JSON of its answer. */
export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

/** Ask for a picture and return a URL of it for an <img>; revoke it when it is no longer shown. */
export async function askPicture(path) {
  return URL.createObjectURL(await (await ask(path)).blob());
}

/** A field as a query or a form has it: JSON where it is more than a word or a number. */
export const asText = (value) => (typeof value === "object" ? JSON.stringify(value) : String(value));

async function reason(answer) {
  try {
    const problem = await answer.json();
    return problem.detail ?? problem.title ?? answer.statusText;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

/** Have another key given, in place of one whose scopes do not suffice; who has none goes back. */
export const changeKey = () => askForKey("page", true, true);

/** Ask people for a key; return whether they gave one. */
function askForKey(door, wasWrong, mayCancel = door === "admin") {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key");
    const given = document.getElementById("key-given");
    document.getElementById("key-title").textContent = door === "admin" ? "This needs an administrator's key" : "This service needs a key";
    document.getElementById("key-why").textContent = door === "admin"
      ? `${wasWrong ? "The key that was given may not do this. " : ""}Fitting, promoting and rolling back need the scope admin.`
      : wasWrong
        ? "The key that was given is not valid here, has expired, or may not do this."
        : "Those who run it can give you one, with the scopes read, predict, acquire, label and metrics for all of this page.";
    document.getElementById("key-not").hidden = !mayCancel;
    given.value = "";
    dialog.returnValue = "";
    dialog.oncancel = (event) => mayCancel || event.preventDefault();
    dialog.addEventListener(
      "close",
      () => {
        const isGiven = dialog.returnValue === "given";
        if (isGiven) keys[door] = given.value.trim();
        given.value = "";
        asking = null;
        resolve(isGiven);
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}
