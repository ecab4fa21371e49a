// The settings of sampling, each with one line that explains it.

import { byId, h } from './dom.js';
import { changeSetting, isUsual, SAMPLING, state, usualSettings } from './state.js';
import { tool } from './tools.js';
import { t } from './words.js';

// A number that is not allowed is not used, and said to be wrong; '' is allowed where it is the default.
function numberInput(name, { min, max, step }) {
	const mayBeEmpty = name === 'seed';
	const wrong = h('p', { class: 'wrong', id: `wrong-${name}`, role: 'alert', hidden: true }, t('between', { min, max }));
	const input = h('input', {
		type: 'number', id: `set-${name}`, min, max, step: step === 1 ? 1 : 'any', value: state.settings[name] ?? '', placeholder: mayBeEmpty ? t('seedNew') : '',
		autocomplete: 'off', 'aria-describedby': `why-${name} wrong-${name}`,
		oninput: () => {
			const isRight = input.value === '' ? mayBeEmpty && !input.validity.badInput : input.validity.valid;
			wrong.hidden = isRight;
			input.setAttribute('aria-invalid', String(!isRight));
			if (isRight) changeSetting(name, input.value === '' ? '' : Number(input.value));
		},
	});
	return [input, wrong];
}

function textInput(name, rows) {
	return [h('textarea', { id: `set-${name}`, rows, value: state.settings[name], spellcheck: false, 'aria-describedby': `why-${name}`, oninput: (event) => changeSetting(name, event.target.value) })];
}

function row(name, words, inputs, isWide) {
	const why = h('p', { class: 'why hint', id: `why-${name}`, hidden: true }, t(`${name}Why`));
	const ask = h('button', {
		class: 'ask', 'aria-label': t('why', { name: words }), 'aria-expanded': 'false', 'aria-controls': `why-${name}`, title: t(`${name}Why`),
		onclick: () => {
			why.hidden = !why.hidden;
			ask.setAttribute('aria-expanded', String(!why.hidden));
		},
	}, '?');
	const [input, ...rest] = inputs;
	return h('div', { class: `setting${isWide ? ' wide' : ''}` }, h('label', { for: `set-${name}`, title: t(`${name}Why`) }, words), ask, input, why, rest);
}

// Functions that the model may call, where it knows how.
const toolsInput = () => [h('input', { type: 'checkbox', id: 'set-tools', checked: state.settings.tools, 'aria-describedby': 'why-tools', onchange: (event) => changeSetting('tools', event.target.checked) })];

export function drawSettings(model) {
	const root = byId('settings');
	root.ariaLabel = t('settings');
	root.replaceChildren(
		h('header', {}, h('h2', {}, t('settings')), tool('defaults', () => { usualSettings(); drawSettings(model); })),
		...Object.entries(SAMPLING).map(([name, range]) => row(name, t(name), numberInput(name, range), false)),
		row('stop', t('stopName'), textInput('stop', 2), true),
		row('system', t('system'), textInput('system', 3), true),
		...(model?.z2a?.tools?.length ? [row('tools', t('tools'), toolsInput(), false)] : []));
	markDefaults();
}

export function markDefaults() {
	const button = byId('settings').querySelector('[data-tool="defaults"]');
	if (button) button.disabled = isUsual();
}
