#!/usr/bin/bash
{{command}} > {{file}}.txt
