package differential

import (
	"fmt"
	"path"
	"strings"
	"sync"
)

// MatrixDifferences are the intended differences between matrices, as patterns of path.Match. Their
// methods may be called concurrently.
type MatrixDifferences struct {
	mu   sync.Mutex
	list []*matrixDifference
}

type matrixDifference struct {
	line   string
	fields [4]string // server, cell, result of the reference, our result
	seen   bool
}

// ReadMatrixDifferences parses lines "SERVER | CELL | RESULT | RESULT". Empty lines and lines that
// begin with # are comments.
func ReadMatrixDifferences(text string) (*MatrixDifferences, error) {
	var m MatrixDifferences
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Split(line, " | ")
		if len(fields) != 4 {
			return nil, fmt.Errorf("known difference %q: want four fields", line)
		}
		m.list = append(m.list, &matrixDifference{line: line, fields: [4]string(fields)})
	}
	return &m, nil
}

// Contain reports whether a difference between matrices of a server is intended. name is the name
// of the matrices.
func (m *MatrixDifferences) Contain(server, name string, d MatrixDifference) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, known := range m.list {
		if known.matches([4]string{server, name + " " + d.Cell, d.Reference, d.Ours}) {
			known.seen = true
			return true
		}
	}
	return false
}

func (d *matrixDifference) matches(fields [4]string) bool {
	for i, pattern := range d.fields {
		if ok, err := path.Match(pattern, fields[i]); err != nil || !ok {
			return false
		}
	}
	return true
}

// NotSeen returns the lines that Contain has not used, except those of one server.
func (m *MatrixDifferences) NotSeen(except string) (lines []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, known := range m.list {
		if !known.seen && known.fields[0] != except {
			lines = append(lines, known.line)
		}
	}
	return lines
}
