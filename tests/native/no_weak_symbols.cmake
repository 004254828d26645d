# Fails if one of OBJECTS defines a weak or unique symbol (an inline function or template with external linkage).
foreach(object ${OBJECTS})
  execute_process(COMMAND ${NM} --defined-only --demangle ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  if(weak)
    list(JOIN weak "\n  " weak)
    message(SEND_ERROR "${object} defines code that other files may end up using:\n  ${weak}")
  endif()
endforeach()
