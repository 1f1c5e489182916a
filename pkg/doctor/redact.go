package doctor

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// An archive leaves the host of its user. It has what explains the state of the program, and
// nothing of its users: no file name, no file handle, no data, no remote key, no address of memory,
// no name or ID of a user's process. The rules list what is kept, so that a field that a later
// version adds is left out.

// removed replaces a value that is left out.
const removed = "(removed)"

// traceFields are the fields of trace events that an archive has. The others are the remote key
// (handle) and its address (offset).
var traceFields = []string{"seq", "time", "event", "connection", "lost", "xid", "mr", "segs", "length", "requests",
	"inline", "credits", "microseconds", "status"}

// redactTrace keeps traceFields of trace events, one JSON object on each line.
func redactTrace(lines []byte) []byte {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	for line := range bytes.Lines(lines) {
		var all map[string]json.RawMessage
		if json.Unmarshal(line, &all) != nil {
			continue
		}
		kept := map[string]json.RawMessage{}
		for _, name := range traceFields {
			if v, found := all[name]; found {
				kept[name] = v
			}
		}
		_ = enc.Encode(kept) // cannot fail: it was JSON before
	}
	return out.Bytes()
}

// logFields are the fields of log messages that an archive has. Others are handles and numbers of
// files, users and processes, and stacks.
var logFields = []string{
	"address", "addr", "after", "bytes", "connection", "control_socket", "credits", "device", "dir", "error",
	"inline_recv", "inline_send", "job", "locks", "metrics", "mount", "next", "options", "owners", "plan",
	"preferred", "provider", "queue", "reason", "request", "restarts", "server", "slots", "socket", "spec",
	"state", "status", "store", "time", "times", "vendor", "version",
}

var (
	// logLine matches a message of the program as text: the level and the rest. Messages of level
	// debug and trace are about single files and do not match.
	logLine = regexp.MustCompile(`\[(INFO|WARN|ERROR)\] .*$`)
	// logField matches one field of a message as text.
	logField = regexp.MustCompile(`(\w+)=("(?:[^"\\]|\\.)*"|\S*)`)
	// systemdLine matches a message of systemd about the unit.
	systemdLine = regexp.MustCompile(`\bsystemd\[\d+\]: `)
)

// redactLog keeps the messages of the program of level info and above, with logFields, and the
// messages of systemd. It counts the lines that it leaves out.
func redactLog(lines []byte) []byte {
	var out bytes.Buffer
	left := 0
	scan := bufio.NewScanner(bytes.NewReader(lines))
	scan.Buffer(nil, maxEntry)
	for scan.Scan() {
		line, found := redactLine(scan.Text())
		if !found {
			left++
			continue
		}
		out.WriteString(line + "\n")
	}
	if left > 0 || scan.Err() != nil {
		fmt.Fprintf(&out, "(%d lines left out: of level debug and trace, and lines that are no messages)\n", left)
	}
	return out.Bytes()
}

// redactLine returns a line of the log without the fields that are left out. It reports false for a
// line that is left out completely.
func redactLine(line string) (string, bool) {
	if systemdLine.MatchString(line) {
		return line, true
	}
	if i := strings.Index(line, "{\""); i >= 0 {
		return redactJSON(line[:i], line[i:])
	}
	at := logLine.FindStringIndex(line)
	if at == nil {
		return "", false
	}
	return line[:at[0]] + logField.ReplaceAllStringFunc(line[at[0]:], func(field string) string {
		name, _, _ := strings.Cut(field, "=")
		if slices.Contains(logFields, name) {
			return field
		}
		return name + "=" + removed
	}), true
}

// redactJSON is redactLine for a message as JSON (log_format = "json").
func redactJSON(before, message string) (string, bool) {
	var all map[string]any
	if json.Unmarshal([]byte(message), &all) != nil {
		return "", false
	}
	if level := all["@level"]; level != "info" && level != "warn" && level != "error" {
		return "", false
	}
	for name := range all {
		if !strings.HasPrefix(name, "@") && !slices.Contains(logFields, name) {
			all[name] = removed
		}
	}
	b, err := json.Marshal(all)
	return before + string(b), err == nil
}
