// The buttons of both views.

import { h } from './dom.js';
import { t } from './words.js';

export const tool = (name, onclick, props = {}) => h('button', { class: 'tool', data: { tool: name }, onclick, ...props }, t(name));
export const action = (name, onclick, props = {}) => tool(name, onclick, { ...props, class: 'main-action' });
export const failure = (words, ...tools) => h('div', { class: 'notice bad', role: 'alert' }, h('p', {}, words), tools);
