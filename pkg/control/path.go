package control

import "path/filepath"

// AbsolutePath makes a path of the caller's that the daemon understands. It looks at nothing.
func AbsolutePath(dir string) (string, error) {
	if dir == "" {
		return "", Errorf(CodeUsage, "mount point \"\": not a path; name a directory")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", Errorf(CodeSystem, "mount point %s: %w", dir, err)
	}
	return abs, nil
}
