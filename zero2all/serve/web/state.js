// What the person chose, kept in the browser. Theme and language may stand in the address instead, as on the board.

export const SAMPLING = {
	temperature: { min: 0, max: 2, step: 0.1 },
	top_k: { min: 0, max: 100000, step: 1 },
	top_p: { min: 0.01, max: 1, step: 0.01 },
	min_p: { min: 0, max: 1, step: 0.01 },
	repetition_penalty: { min: 0.1, max: 2, step: 0.05 },
	max_tokens: { min: 1, max: 1000000, step: 1 },
	seed: { min: 0, max: 2147483647, step: 1 },
};
// Seed '': another one for each answer. The rest is what the server says, which is what the terminal takes.
const USUAL = { seed: '', stop: '', system: '', tools: false };
const settings = (...changed) => Object.assign(Object.create(USUAL), ...changed); // what was not changed is read from USUAL
const DEFAULTS = {
	mode: '', // chat or continue; '': what suits the model
	probabilities: false,
	conversation: '', // id of the one that is open
	settings: settings(),
	theme: '',
	lang: '',
};
const KEPT = 'z2a-talk';

const listeners = [];
export const state = { ...DEFAULTS };

export function read(key) {
	try {
		return JSON.parse(localStorage.getItem(key));
	} catch {
		return null; // nothing is kept, or not by this page
	}
}

// Whether it could be kept: the browser may refuse, and its space may be full.
export function write(key, value) {
	try {
		localStorage.setItem(key, JSON.stringify(value));
		return true;
	} catch {
		return false;
	}
}

export function readState() {
	const kept = read(KEPT) ?? {};
	Object.assign(state, kept, { settings: settings(kept.settings) });
	const given = new URLSearchParams(location.hash.slice(1));
	for (const name of ['lang', 'theme', 'mode']) if (given.get(name)) state[name] = given.get(name);
}

// Change some of it; listeners get the names.
export function change(values) {
	Object.assign(state, values);
	write(KEPT, state);
	for (const listener of listeners) listener(new Set(Object.keys(values)));
}

export const changeSetting = (name, value) => change({ settings: settings(state.settings, { [name]: value }) });
export const usualSettings = () => change({ settings: settings() });
export const isUsual = () => Object.entries(state.settings).every(([name, value]) => value === USUAL[name]);
export const allSettings = () => ({ ...USUAL, ...state.settings });
export const takeUsual = (values) => Object.assign(USUAL, values);
export const onChange = (listener) => listeners.push(listener);
