# Writes a copy of a source with one fault in it: -DSOURCE= -DCOPY= -DRIGHT= (must occur once) -DWRONG=
file(READ ${SOURCE} text)
string(FIND "${text}" "${RIGHT}" first)
string(FIND "${text}" "${RIGHT}" last REVERSE)
if(first EQUAL -1 OR NOT first EQUAL last)
  message(FATAL_ERROR "${SOURCE} must have this once: ${RIGHT}")
endif()
string(REPLACE "${RIGHT}" "${WRONG}" text "${text}")
file(WRITE ${COPY} "${text}")
