package control

import "path/filepath"

// AbsolutePath returns dir as an absolute path, because the daemon has another working directory
// than its clients. It does not access the file system.
func AbsolutePath(dir string) (string, error) {
	if dir == "" {
		return "", Errorf(CodeUsage, "mount point \"\": empty path; name a directory")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return "", Errorf(CodeSystem, "mount point %s: %w", dir, err)
	}
	return abs, nil
}
