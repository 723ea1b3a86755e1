#!/usr/bin/bash
touch ready.txt
