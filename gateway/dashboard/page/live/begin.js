// Asks for the data while the rest of the page is still on its way.

import { start } from "./poll.js";

start();
