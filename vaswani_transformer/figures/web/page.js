/** A page of recorded data: a search, attention weights, or both. */
import { showAttention } from "./attention-view.js";
import { byId } from "./dom.js";
import { SearchView } from "./search-view.js";

const { search, attention } = JSON.parse(byId("payload").textContent);
if (search) new SearchView().show(search);
if (attention) showAttention(attention, true);
